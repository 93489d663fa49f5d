"""Number of workers that a load needs.

Pure.
"""

import math
from dataclasses import dataclass

from cluster.roles import Role
from planner.config import PolicyConfig
from planner.estimates import Estimates
from planner.observation import Observation

LEAST_STREAMS = 1.0
KV_SHARE = 0.85
"""Share of a decode worker's KV blocks that should be in use: the rest takes the variation of outputs."""
ITL_SHARE = 0.8
"""Share of the ITL's SLO that the mean should reach, so that most requests keep it."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Load of one pool: predicted and waiting."""

    mean: float
    """Concurrent work at the predicted rate: busy prefill workers, or decode streams."""
    waiting: float
    """Workers needed to finish the waiting work within `clear_s`; or streams that wait."""
    per_worker: float
    """Amount of such work that one worker may have."""

    def workers(self, headroom: float, margin: float = 0.0) -> int:
        """Return the number of workers by square-root staffing.

        The mean plus `headroom` standard deviations of a Poisson load. The spare part also does waiting work; more
        workers are needed where the waiting work would take it longer than `clear_s`.
        """
        mean = self.mean * (1 + margin)
        free = max(headroom * math.sqrt(mean), self.waiting)
        return math.ceil((mean + free) / self.per_worker - 1e-9)


def load_of(role: Role, learned: Estimates, seen: Observation, config: PolicyConfig) -> PoolLoad:
    return _prefill(learned, seen, config) if role == "prefill" else _decode(learned, seen, config)


def streams_per_worker(learned: Estimates, seen: Observation, config: PolicyConfig) -> float:
    """Return the streams that a decode worker may have within the ITL target and within its blocks."""
    itl, pool = learned.itl, seen.decode
    by_itl = (ITL_SHARE * config.itl_s - itl.fixed_s) / itl.unit_s
    by_kv = math.inf
    if pool.serving and learned.stream_blocks.value > 0:
        by_kv = KV_SHARE * pool.num_blocks / pool.serving / learned.stream_blocks.value
    return max(LEAST_STREAMS, min(by_itl, by_kv))


def decode_is_full(learned: Estimates, seen: Observation, config: PolicyConfig) -> bool:
    """Return whether queued requests wait for decode capacity rather than for a lender.

    True when too many blocks are in use, or too few are free on each worker for one more typical stream.
    """
    pool = seen.decode
    if pool.serving == 0 or pool.used_blocks >= KV_SHARE * pool.num_blocks:
        return True
    return (pool.num_blocks - pool.used_blocks) / pool.serving < learned.stream_blocks.value


def _prefill(learned: Estimates, seen: Observation, config: PolicyConfig) -> PoolLoad:
    busy = learned.arrivals.at(config.start_s) * learned.prefill_s.value
    waiting = 0.0 if decode_is_full(learned, seen, config) and seen.prefill.serving else seen.waiting_tokens
    waiting_s = waiting * min(1.0, learned.computed_share.value) / learned.prefill_tokens_per_s.value
    return PoolLoad(busy, waiting_s / config.clear_s, 1.0)


def _decode(learned: Estimates, seen: Observation, config: PolicyConfig) -> PoolLoad:
    arrivals = learned.arrivals
    growth = arrivals.at(config.start_s) / arrivals.level if arrivals.level > 0 else 1.0
    waiting = seen.waiting if decode_is_full(learned, seen, config) else 0
    return PoolLoad(learned.running * growth, waiting, streams_per_worker(learned, seen, config))
