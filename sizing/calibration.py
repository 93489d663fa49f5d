"""Calibration: a live cluster's speeds from its receipts, in a file that replaces its hardware in a replay.

Log of decisions with all their inputs, as JSON lines, from which each decision can be repeated.

A router's `records_file` with `record_placements` has the same, and the outcomes.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Self, TextIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cluster.roles import Role
from engine.backends.sim.settings import StepTiming, StepWork, Timing
from kvcache.block_keys import BlockKey
from kvcache.layout import KvLayout
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.place import Decision
from router.placement.rates import Ints, Priors
from router.placement.snapshots import PlacementSnapshot, recorded
from workloads.request import SHOWN, BadSetup

LONGEST_S = 3600.0
"""Largest term of a step's time, in seconds."""
Seconds = Annotated[float, Field(ge=0, le=3600)]
Count = Annotated[int, Field(ge=1, le=1 << 40)]


class Fit(BaseModel):
    """Quality of a fit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int
    """Number of measurements."""
    error: float
    """Median of |measured / fitted - 1|."""
    jitter: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Standard deviation of the logarithm of one step's time, caused by other load on its machine."""


@dataclass(frozen=True, slots=True)
class Jittered:
    """Timing with jitter: `timing` times a factor with mean 1.

    The factor depends on the step's work only, so a run is reproducible in whatever order its steps are asked for.
    """

    timing: StepTiming
    jitter: float

    def seconds_of(self, work: StepWork) -> float:
        seconds = self.timing.seconds_of(work)
        if not self.jitter:
            return seconds
        mixed = hash((work.prompt_tokens, work.prompt_pairs, work.streams, work.context_tokens)) * _ODD & _MASK
        share = ((mixed ^ (mixed >> 31)) & 0xFFFFFFFF) + 0.5
        return seconds * math.exp(self.jitter * _NORMAL.inv_cdf(share / (1 << 32)) - self.jitter**2 / 2)


_IN_WORDS = {
    "block_bytes": "bytes of a block",
    "nic_bytes_per_s": "links",
    "prefill": "steps of prefill workers",
    "num_blocks": "KV pools",
}
_NORMAL = NormalDist()
_ODD, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Calibration(BaseModel):
    """Timing parameters fitted for one cluster and one model, in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    decode: StepTiming
    prefill: StepTiming | None = None
    """Step timing of prefill workers; None: no worker lent computed blocks."""
    nic_bytes_per_s: Annotated[float, Field(gt=0, le=1e15)]
    read_latency_s: Seconds
    message_s: Seconds
    """Seconds of a message from one process to another."""
    event_lag_s: Seconds = 0.02
    """Seconds between a change at a worker and its report to routers."""
    block_tokens: Count
    block_bytes: Count
    num_blocks: Count
    """Blocks of each worker's pool."""
    prefill_chunk: Count = 512
    decode_chunk: Count = 128
    """Prompt tokens of a decode worker's step: its `max_prefill_tokens`."""
    decode_prompts: bool = True
    """Whether decode workers computed whole prompts, so that routers have measured their speed."""
    fits: dict[str, Fit] = {}
    not_measured: dict[str, str] = {}
    """Fields that were given or assumed, and by whom."""

    @field_validator("decode", "prefill")
    @classmethod
    def _takes_a_time(cls, timing: StepTiming | None) -> StepTiming | None:
        for name in [field.name for field in fields_of(StepTiming)] if timing else ():
            if not 0 <= (value := getattr(timing, name)) <= LONGEST_S:
                raise ValueError(f"{name} is {value:g}, not 0 to {LONGEST_S:g} s")
        return timing

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises BadSetup.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise BadSetup("calibration", f"{path}: {error.strerror}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))[:SHOWN]
            raise BadSetup("calibration", f"{path}: {where}: {first['msg']}") from None

    def write(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=1) + "\n")

    @property
    def caveat(self) -> str:
        """Text naming fields that were not measured; empty where all were."""
        reasons = "; ".join(f"{_IN_WORDS.get(name, name)}: {reason}" for name, reason in self.not_measured.items())
        return f"not measured: {reasons}" if reasons else ""

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
        """KV layout with blocks of as many bytes, or slightly fewer."""
        per_token = max(2, self.block_bytes // self.block_tokens)
        return KvLayout(1, 1, max(1, per_token // 4), self.block_tokens, "bfloat16")


class LoggedFleet(Fleet):
    """Fleet with a log of its decisions."""

    def __init__(self, router_id: str, priors: Priors, learn_rates: bool, log: TextIO) -> None:
        super().__init__(router_id, priors, learn_rates)
        self._log = log

    def decide(self, demand: Demand, keys: Sequence[BlockKey], available: Ints | None = None) -> Decision | None:
        decision = super().decide(demand, keys, available)
        if decision is not None:
            assert self._decided is not None
            _, hits, _ = self._decided
            placement_snapshot = PlacementSnapshot(demand, self.snapshot, hits, self.rates, available)
            self._log.write(json.dumps(recorded(decision, placement_snapshot), separators=(",", ":")) + "\n")
        return decision
