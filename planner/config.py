"""Settings of the planner's policy."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from cluster.config import Config
from cluster.errors import StartError


class PoolConfig(Config):
    """Of one pool."""

    min_workers: NonNegativeInt = 1
    """0: the pool may go when nothing was asked for `down_after_s`, and comes back with the next request. A router lets
    requests wait for a decode worker for `no_worker_grace_s`, which should then be more than `start_s`."""
    max_workers: NonNegativeInt = 8
    headroom: NonNegativeFloat = 1.0
    """Beyond the mean load N, room for so many times √N (square-root staffing): what is free so that little waits. It
    grows while requests miss the SLO for want of it, and comes back slowly."""


class PolicyConfig(Config):
    """When a pool grows and shrinks."""

    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    max_total: PositiveInt | None = None
    """Workers of both pools together, where they share GPUs."""

    ttft_s: PositiveFloat = 2.0
    """The SLO: of the first token."""
    itl_s: PositiveFloat = 0.05
    """And of the mean time between a request's tokens."""
    goal: float = Field(default=0.95, gt=0, lt=1)
    """Share of the requests that are to keep each of them."""

    start_s: NonNegativeFloat = 60.0
    """Until a new worker serves: load is predicted for so long ahead."""
    switch: bool = False
    """A worker may change its role in place. Only where the executor can, and both pools have the same hardware."""
    switch_s: NonNegativeFloat = 30.0
    """What that takes: its streams go on for up to `drain_s` before they are handed over. Where it is not less than
    `start_s`, nobody switches."""
    clear_s: PositiveFloat = 10.0
    """What waits is to be gone within this time."""
    down_after_s: NonNegativeFloat = 180.0
    """A pool shrinks only when fewer workers would have done for so long without a break."""
    down_every_s: NonNegativeFloat = 30.0
    """And then at most a step in this time."""
    down_share: float = Field(default=0.2, gt=0, le=1)
    """A step: this part of the pool, rounded down, at least one worker."""
    margin: float = Field(default=0.1, ge=0, le=1)
    """Fewer would have done: also of a load larger by this part. So what wavers by less changes nothing."""

    kv_share: float = Field(default=0.85, gt=0, le=1)
    """Of a decode worker's blocks: how many are to be taken."""
    itl_share: float = Field(default=0.8, gt=0, le=1)
    """Of `itl_s`: the mean that is aimed at."""
    prefill_tokens_per_s: PositiveFloat = 4000.0
    """Of a prefill worker that is busy, until it was seen; as are the three below."""
    prompt_tokens: PositiveFloat = 2000.0
    """Of a request."""
    step_s: PositiveFloat = 0.02
    """A decode worker's, of a single stream."""
    stream_delay_s: PositiveFloat = 0.001
    """What every further stream adds."""

    def pool(self, role: str) -> PoolConfig:
        return self.prefill if role == "prefill" else self.decode

    def check(self) -> None:
        """Raises StartError for settings that contradict each other."""
        least = 0
        for role in ("prefill", "decode"):
            pool = self.pool(role)
            least += pool.min_workers
            if pool.min_workers > pool.max_workers:
                raise StartError(
                    f"{role}.min_workers", f"{pool.min_workers} is more than max_workers, {pool.max_workers}"
                )
        if not self.decode.max_workers:
            raise StartError("decode.max_workers", "0 would serve nothing")
        if self.max_total is not None and self.max_total < max(1, least):
            raise StartError("max_total", f"{self.max_total} is less than both pools' min_workers, {max(1, least)}")
