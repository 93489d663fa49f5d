"""Settings of the sim engine.

Duration of a step of the sim backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import NonNegativeFloat, PositiveInt

from engine.core_types import Chunk
from engine.settings import CommonSettings


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


class SimSettings(CommonSettings):
    """Part of a worker's settings that only the sim engine reads."""

    sim_step_ms: NonNegativeFloat = 0.0
    """Milliseconds that a step of the sim engine takes; the term below is added."""
    sim_prompt_token_us: NonNegativeFloat = 0.0
    """Microseconds per prompt token of the step."""
    sim_reads: Literal["all", "last"] = "all"
    """KV that a token of the sim engine is a hash of: all of the sequence, or that of its last token (faster with many
    long sequences)."""
    sim_block_kib: PositiveInt = 2
    """Size of a KV block of 16 tokens in the sim engine, in KiB."""

    def timing(self) -> StepTiming:
        return StepTiming(self.sim_step_ms * 1e-3, self.sim_prompt_token_us * 1e-6)
