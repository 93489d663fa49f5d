"""What a live cluster's own receipts say of it: a file that stands for its machines when a trace is replayed."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Self

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from cluster.roles import Role
from engine.layout import KvLayout
from engine.sim.timing import StepTiming, StepWork, Timing
from simulator.errors import BadSetup


class Fit(BaseModel):
    """How well times follow from what was fitted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int
    """Measurements."""
    error: float
    """Median of |measured / fitted - 1|."""
    jitter: NonNegativeFloat = 0.0
    """Standard deviation of the logarithm of one step's time: what else there is on its machine."""


@dataclass(frozen=True, slots=True)
class Jittered:
    """Steps take what `timing` says, times a factor that is 1 on average. It follows from what the step computes, so
    that a run is the same whenever it is run, and in whatever order its steps are asked for."""

    timing: StepTiming
    jitter: float

    def seconds_of(self, work: StepWork) -> float:
        seconds = self.timing.seconds_of(work)
        if not self.jitter:
            return seconds
        mixed = hash((work.prompt_tokens, work.prompt_pairs, work.streams, work.context_tokens)) * _ODD & _MASK
        share = ((mixed ^ (mixed >> 31)) & 0xFFFFFFFF) + 0.5
        return seconds * math.exp(self.jitter * _NORMAL.inv_cdf(share / (1 << 32)) - self.jitter**2 / 2)


_NORMAL = NormalDist()
_ODD, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Calibration(BaseModel):
    """Of one cluster and one model. Times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    decode: StepTiming
    prefill: StepTiming | None = None
    """None: nobody lent what it computed."""
    nic_bytes_per_s: PositiveFloat
    read_latency_s: NonNegativeFloat
    message_s: NonNegativeFloat
    """From one process to the next."""
    event_lag_s: NonNegativeFloat = 0.02
    """Workers tell routers every so often what has changed."""
    block_tokens: PositiveInt
    block_bytes: PositiveInt
    num_blocks: PositiveInt
    """Of each worker's pool."""
    prefill_chunk: PositiveInt = 512
    decode_chunk: PositiveInt = 128
    """Prompt tokens of a step: the workers' `max_prefill_tokens`."""
    fits: dict[str, Fit] = {}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises BadSetup."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise BadSetup("calibration", f"{path}: {error.strerror}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise BadSetup("calibration", f"{path}: {where}: {first['msg']}") from None

    def write(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=1) + "\n")

    def timing(self, role: Role) -> Timing:
        if role == "prefill" and self.prefill is not None:
            return self._jittered(self.prefill, "prefill")
        return self._jittered(self.decode, "decode")

    def _jittered(self, timing: StepTiming, fitted: str) -> Timing:
        fit = self.fits.get(fitted)
        return Jittered(timing, fit.jitter if fit else 0.0)

    def chunk(self, role: Role) -> int:
        return self.prefill_chunk if role == "prefill" else self.decode_chunk

    def layout(self) -> KvLayout:
        """Of blocks of as many bytes, or a few less."""
        per_token = max(2, self.block_bytes // self.block_tokens)
        return KvLayout(1, 1, max(1, per_token // 4), self.block_tokens, "bfloat16")
