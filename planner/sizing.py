"""How many workers a load takes. Pure."""

import math
from dataclasses import dataclass

from cluster.roles import Role
from planner.config import PolicyConfig
from planner.estimates import Estimates
from planner.observation import Observation

LEAST_STREAMS = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """Of one pool: what comes, and what waits."""

    mean: float
    """Things under way at a time, at the rate that is predicted: workers that would be busy, or streams."""
    waiting: float
    """Workers that it would take to have what waits done in `clear_s`; or streams that wait."""
    per_worker: float
    """Of such things, that one worker may have."""

    def workers(self, headroom: float, margin: float = 0.0) -> int:
        """Square-root staffing: the mean, and `headroom` times its standard deviation were it Poisson's. That is free
        in the mean, and does what waits; more is wanted where more waits than that does in time."""
        mean = self.mean * (1 + margin)
        free = max(headroom * math.sqrt(mean), self.waiting)
        return math.ceil((mean + free) / self.per_worker - 1e-9)


def load_of(role: Role, learned: Estimates, seen: Observation, config: PolicyConfig) -> Load:
    return _prefill(learned, seen, config) if role == "prefill" else _decode(learned, seen, config)


def streams_per_worker(learned: Estimates, seen: Observation, config: PolicyConfig) -> float:
    """That a decode worker may have: within the ITL that is aimed at, and within its blocks."""
    itl, pool = learned.itl, seen.decode
    by_itl = (config.itl_share * config.itl_s - itl.fixed_s) / itl.unit_s
    by_kv = math.inf
    if pool.serving and learned.stream_blocks.value > 0:
        by_kv = config.kv_share * pool.num_blocks / pool.serving / learned.stream_blocks.value
    return max(LEAST_STREAMS, min(by_itl, by_kv))


def decode_is_full(learned: Estimates, seen: Observation, config: PolicyConfig) -> bool:
    """What waits in line waits for room on a decode worker, and not for a lender: too many blocks are taken, or too few
    are left on each for a stream as they are."""
    pool = seen.decode
    if pool.serving == 0 or pool.used_blocks >= config.kv_share * pool.num_blocks:
        return True
    return (pool.num_blocks - pool.used_blocks) / pool.serving < learned.stream_blocks.value


def _prefill(learned: Estimates, seen: Observation, config: PolicyConfig) -> Load:
    busy = learned.arrivals.at(config.start_s) * learned.prefill_s.value
    waiting = 0.0 if decode_is_full(learned, seen, config) and seen.prefill.serving else seen.waiting_tokens
    waiting_s = waiting * min(1.0, learned.computed_share.value) / learned.prefill_tokens_per_s.value
    return Load(busy, waiting_s / config.clear_s, 1.0)


def _decode(learned: Estimates, seen: Observation, config: PolicyConfig) -> Load:
    arrivals = learned.arrivals
    growth = arrivals.at(config.start_s) / arrivals.level if arrivals.level > 0 else 1.0
    waiting = seen.waiting if decode_is_full(learned, seen, config) else 0
    return Load(learned.running * growth, waiting, streams_per_worker(learned, seen, config))
