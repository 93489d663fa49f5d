"""Settings of the sim engine."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from engine.backends.sim.timing import StepTiming
from engine.settings import CommonSettings


class SimSettings(CommonSettings):
    """Part of a worker's settings that only the sim engine reads."""

    sim_step_ms: NonNegativeFloat = 0.0
    """Milliseconds that a step of the sim engine takes; the four terms below are added."""
    sim_prompt_token_us: NonNegativeFloat = 0.0
    """Microseconds per prompt token of the step."""
    sim_prompt_pair_ns: NonNegativeFloat = 0.0
    """Nanoseconds per pair of a prompt token and a token before it: attention's quadratic term."""
    sim_stream_us: NonNegativeFloat = 0.0
    """Microseconds per decoding sequence."""
    sim_kv_token_ns: NonNegativeFloat = 0.0
    """Nanoseconds per token of context of each decoding sequence."""
    sim_reads: Literal["all", "last"] = "all"
    """KV that a token of the sim engine is a hash of: all of the sequence, or that of its last token (faster with many
    long sequences)."""
    sim_block_kib: PositiveInt = 2
    """Size of a KV block of 16 tokens in the sim engine, in KiB."""

    def timing(self) -> StepTiming:
        return StepTiming(
            step_s=self.sim_step_ms * 1e-3,
            prompt_token_s=self.sim_prompt_token_us * 1e-6,
            prompt_pair_s=self.sim_prompt_pair_ns * 1e-9,
            stream_s=self.sim_stream_us * 1e-6,
            kv_token_s=self.sim_kv_token_ns * 1e-9,
        )
