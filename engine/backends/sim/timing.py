"""Duration of a step of the sim backend.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.core_types import Chunk


@dataclass(slots=True)
class StepWork:
    """Work of a step in whole numbers, so that equal steps take equal times in any order of summation."""

    prompt_tokens: int = 0
    prompt_pairs: int = 0
    """Pairs of a prompt token and itself or an earlier one: the quadratic part of attention."""
    streams: int = 0
    """Number of decoding sequences."""
    context_tokens: int = 0
    """Tokens of context that decoding sequences read, the new one included."""

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
    """Model of step durations."""

    def seconds_of(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Step duration in seconds as a sum of terms: weights, arithmetic of prompts, and KV reads."""

    step_s: float = 0.0
    """Seconds of every step."""
    prompt_token_s: float = 0.0
    """Seconds per prompt token."""
    prompt_pair_s: float = 0.0
    """Seconds per pair of a prompt token and a token before it: the quadratic part of attention."""
    stream_s: float = 0.0
    """Seconds per decoding sequence."""
    kv_token_s: float = 0.0
    """Seconds per token of context of each decoding sequence."""

    def seconds(self, batch: Sequence[Chunk]) -> float:
        return self.seconds_of(StepWork.of(batch))

    def seconds_of(self, work: StepWork) -> float:
        prompts_s = self.prompt_token_s * work.prompt_tokens + self.prompt_pair_s * work.prompt_pairs
        return self.step_s + prompts_s + self.stream_s * work.streams + self.kv_token_s * work.context_tokens


AT_ONCE = StepTiming()
