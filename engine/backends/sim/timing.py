"""How long a step of the sim engine takes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.core.core_types import Chunk


@dataclass(slots=True)
class StepWork:
    """What a step computes, in whole numbers: they add up in any order, so that equal steps take equal times."""

    prompt_tokens: int = 0
    prompt_pairs: int = 0
    """Pairs of a prompt token and itself or one before it: what attention is quadratic in."""
    streams: int = 0
    """Sequences that decode."""
    context_tokens: int = 0
    """Of those, tokens that are read, the new one included."""

    @classmethod
    def of(cls, batch: Sequence[Chunk]) -> "StepWork":
        work = cls()
        for chunk in batch:
            if chunk.sequence.decoding:
                work.streams += 1
                work.context_tokens += chunk.start + chunk.count
            else:
                work.prompt_tokens += chunk.count
                work.prompt_pairs += chunk.count * (2 * chunk.start + chunk.count + 1) // 2
        return work


class Timing(Protocol):
    """Says how long a step takes."""

    def seconds_of(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class StepTiming:
    """A step's seconds are a sum of these terms: what reading the weights costs, what arithmetic on the prompts'
    tokens costs, and what reading KV costs."""

    step_s: float = 0.0
    """Of every step."""
    prompt_token_s: float = 0.0
    """Of each prompt token."""
    prompt_pair_s: float = 0.0
    """Of each pair of a prompt token and a token before it: the quadratic term of attention."""
    stream_s: float = 0.0
    """Of each sequence that decodes."""
    kv_token_s: float = 0.0
    """Of each token of context of each sequence that decodes."""

    def seconds(self, batch: Sequence[Chunk]) -> float:
        return self.seconds_of(StepWork.of(batch))

    def seconds_of(self, work: StepWork) -> float:
        prompts_s = self.prompt_token_s * work.prompt_tokens + self.prompt_pair_s * work.prompt_pairs
        return self.step_s + prompts_s + self.stream_s * work.streams + self.kv_token_s * work.context_tokens


AT_ONCE = StepTiming()
