"""Settings of the planner's policy."""

from typing import ClassVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from cluster.config import Config
from cluster.errors import StartError


class PoolConfig(Config):
    """Settings of one pool."""

    min_workers: NonNegativeInt = 1
    """Smallest number of workers. With 0 the pool may vanish after `down_after_s` without requests, and returns with
    the next one. A router lets requests wait for a decode worker for `no_worker_grace_s`, which should then exceed
    `start_s`."""
    max_workers: NonNegativeInt = 8
    """Largest number of workers."""
    headroom: ClassVar[float] = 1.0
    """Spare workers beyond the mean load N, in units of √N (square-root staffing). It grows while requests miss the SLO
    for lack of it, and returns slowly."""


class PolicyConfig(Config):
    """Settings that say when a pool grows and shrinks."""

    prefill: PoolConfig = PoolConfig()
    """Settings of the prefill pool."""
    decode: PoolConfig = PoolConfig()
    """Settings of the decode pool."""
    max_total: PositiveInt | None = None
    """Largest number of workers of both pools together, where they share GPUs."""

    ttft_s: PositiveFloat = 2.0
    """SLO of the time to first token, in seconds."""
    itl_s: PositiveFloat = 0.05
    """SLO of a request's mean inter-token latency, in seconds."""
    goal: float = Field(default=0.95, gt=0, lt=1)
    """Share of requests that should keep each SLO."""

    start_s: NonNegativeFloat = 60.0
    """Seconds until a new worker serves; the load is predicted that far ahead."""
    switch: bool = False
    """Whether a worker may change its role in place: on equal hardware in both pools, and with a `start_s` above 30,
    since a switch takes that long. Where nothing else sizes the pools, workers then switch, and their number stays."""
    switch_s: ClassVar[float] = 30.0
    """Seconds that a role switch takes: streams go on for up to `drain_s` before they are handed over. No worker
    switches unless this is less than `start_s`."""
    clear_s: ClassVar[float] = 10.0
    """Seconds within which waiting work should be done."""
    down_after_s: NonNegativeFloat = 180.0
    """Seconds without interruption for which fewer workers must have sufficed before a pool shrinks; then it shrinks
    in steps, each a sixth of that after the last one."""
    margin: ClassVar[float] = 0.1
    """Share by which the load may grow without needing the workers that are removed. A load that varies by less changes
    nothing."""

    prefill_tokens_per_s: PositiveFloat = 4000.0
    """Prompt tokens per second of a busy prefill worker, assumed until measured, as are the figures below."""
    prompt_tokens: ClassVar[float] = 2000.0
    """Prompt tokens of a request."""
    step_s: PositiveFloat = 0.02
    """Seconds of a decode step with a single stream."""
    stream_delay_s: PositiveFloat = 0.001
    """Seconds that each further stream adds to a decode step."""

    @property
    def every_s(self) -> float:
        """Seconds between two decisions: 5 by default, fewer for pools that shrink sooner."""
        return min(5.0, max(0.2, self.down_after_s / 36))

    @property
    def down_every_s(self) -> float:
        """Shortest time between two shrink steps, in seconds."""
        return self.down_after_s / 6

    def pool(self, role: str) -> PoolConfig:
        return self.prefill if role == "prefill" else self.decode

    def check(self) -> None:
        """Check settings against each other.

        Raises StartError.
        """
        least = 0
        for role in ("prefill", "decode"):
            pool = self.pool(role)
            least += pool.min_workers
            if pool.min_workers > pool.max_workers:
                raise StartError(
                    f"{role}.min_workers", f"{pool.min_workers} is more than max_workers, {pool.max_workers}"
                )
        if not self.decode.max_workers:
            raise StartError("decode.max_workers", "must be at least 1: without decode workers nothing is served")
        if self.max_total is not None and self.max_total < max(1, least):
            raise StartError("max_total", f"{self.max_total} is less than both pools' min_workers, {max(1, least)}")
