"""Estimates of workers' speed and of arrivals to come.

Immutable values: each observation gives new ones. Pure.

Number of workers that a load needs.

The state of all routers at one moment, as the planner sees it.

Pure.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.roles import Role
from planner.config import PolicyConfig
from protos import inference_pb2 as pb
from router.placement.rates import LinearFit

MOST_ROUTERS = 256
"""Largest number of routers that are remembered."""


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """Workers of one role."""

    serving: int = 0
    """Workers that joined, report load and are not draining."""
    starting: int = 0
    """Workers that the executor was asked for and that do not serve yet."""
    busy: int = 0
    """Serving workers that have prompt tokens to compute."""
    queued_tokens: int = 0
    """Prompt tokens queued at the workers."""
    running: int = 0
    """Requests at the workers."""
    num_blocks: int = 0
    """KV blocks of the workers."""
    used_blocks: int = 0
    """KV blocks that a new request could not use."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters that only grow."""

    arrived: int = 0
    arrived_tokens: int = 0
    ended_tokens: int = 0
    """Prompt tokens of requests that ended well; then the part computed by lenders, and by decode workers."""
    lent_tokens: int = 0
    own_tokens: int = 0
    refused: int = 0
    first_tokens: float = 0
    ttft_missed: float = 0
    """First tokens later than the SLO."""
    streams: float = 0
    """Requests whose inter-token latency is known."""
    itl_missed: float = 0
    itl_sum_s: float = 0.0

    def since(self, before: "Counters") -> "Counters":
        """Return the increase since `before`."""
        return Counters(*(max(0, getattr(self, name) - getattr(before, name)) for name in self.__slots__))

    def plus(self, more: "Counters") -> "Counters":
        return Counters(*(getattr(self, name) + getattr(more, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Observation:
    """State at one moment."""

    at_s: float
    """Time by any monotonic clock, in seconds."""
    prefill: PoolObservation = PoolObservation()
    decode: PoolObservation = PoolObservation()
    waiting: int = 0
    """Requests in the routers' queues."""
    waiting_tokens: int = 0
    """Prompt tokens of the waiting requests."""
    counters: Counters = field(default_factory=Counters)

    def pool(self, role: Role) -> PoolObservation:
        return self.prefill if role == "prefill" else self.decode


class Tallies:
    """Counters of all routers together.

    A router that does not answer keeps its counters. A new or restarted router counts from its first answer.
    """

    def __init__(self) -> None:
        self.total = Counters()
        self._last: dict[str, Counters] = {}
        """Last counters per router, most recent answer last."""

    def record(self, router: str, counters: Counters) -> None:
        """Add one router's counters.

        `router` differs for each start of the process.
        """
        before = self._last.pop(router, counters)
        self._last[router] = counters
        self.total = self.total.plus(counters.since(before))
        if len(self._last) > MOST_ROUTERS:
            del self._last[next(iter(self._last))]


def counters_of(status: pb.ModelStatus, ttft_s: float, itl_s: float) -> Counters:
    """Return one router's counters of one model, with misses of the SLO."""
    traffic = status.traffic
    return Counters(
        arrived=traffic.arrived,
        arrived_tokens=traffic.arrived_tokens,
        ended_tokens=traffic.ended_tokens,
        lent_tokens=traffic.lent_tokens,
        own_tokens=traffic.own_tokens,
        refused=sum(status.refused.values()),
        first_tokens=sum(traffic.ttft.counts),
        ttft_missed=missed(traffic.ttft, ttft_s),
        streams=sum(traffic.itl.counts),
        itl_missed=missed(traffic.itl, itl_s),
        itl_sum_s=traffic.itl.sum_s,
    )


def observe(
    at_s: float, routers: Sequence[pb.ModelStatus], starting: Mapping[Role, int], counters: Counters
) -> Observation:
    """Combine the answering routers' reports of one model.

    Workers are common to all routers; requests belong to one.
    """
    workers = {worker.worker_id: worker for status in routers for worker in status.workers}
    return Observation(
        at_s=at_s,
        prefill=_pool("prefill", workers.values(), starting),
        decode=_pool("decode", workers.values(), starting),
        waiting=sum(status.waiting for status in routers),
        waiting_tokens=sum(status.traffic.waiting_tokens for status in routers),
        counters=counters,
    )


def missed(latencies: pb.Latencies, limit_s: float) -> float:
    """Return how many latencies exceeded `limit_s`, interpolated within the limit's bucket."""
    below, late = 0.0, 0.0
    for number, count in enumerate(latencies.counts):
        bound = latencies.bounds_s[number] if number < len(latencies.bounds_s) else float("inf")
        if below >= limit_s:
            late += count
        elif bound > limit_s:
            late += count * (1.0 if bound == float("inf") else (bound - limit_s) / (bound - below))
        below = bound
    return late


def _pool(role: Role, workers: Iterable[pb.WorkerStatus], starting: Mapping[Role, int]) -> PoolObservation:
    heard = [worker for worker in workers if worker.role == role and worker.has_reported and not worker.draining]
    return PoolObservation(
        serving=len(heard),
        starting=starting.get(role, 0),
        busy=sum(worker.queued_prefill_tokens > 0 for worker in heard),
        queued_tokens=sum(worker.queued_prefill_tokens for worker in heard),
        running=sum(worker.running for worker in heard),
        num_blocks=sum(worker.num_blocks for worker in heard),
        used_blocks=sum(max(0, worker.num_blocks - worker.available_blocks) for worker in heard),
    )


LEVEL_S, TREND_S = 60.0, 180.0
"""Seconds after which the arrival rate, and its trend, count for less than 1/e."""
RUNNING_S = 20.0
"""Seconds after which running streams count for less than 1/e."""
REQUESTS = 1000.0
"""Requests after which prompt lengths and their computed share count for less than 1/e."""
BUSY_S = 1200.0
"""Seconds of a busy worker after which its measured speed counts for less than 1/e."""
MISSES = 100.0
"""Requests after which the share that misses the SLO counts for less than 1/e."""
LEAST = 1e-9
DOUBT = 0.05
"""Weight of a prior, as a share of what is remembered."""
MOST_GROWTH = 2.0
"""Largest predicted arrival rate, as a multiple of the present one."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A running ratio of an amount per unit, such as seconds per request.

    Old units count less; idle time forgets nothing.
    """

    amount: float
    units: float
    memory: float

    @classmethod
    def prior(cls, value: float, memory: float) -> "Ratio":
        return cls(value * DOUBT * memory, DOUBT * memory, memory)

    @property
    def value(self) -> float:
        return self.amount / self.units

    def updated(self, amount: float, units: float) -> "Ratio":
        """Return the ratio with a new observation; neither argument is below 0."""
        kept = math.exp(-units / self.memory)
        return replace(self, amount=self.amount * kept + amount, units=self.units * kept + units)


@dataclass(frozen=True, slots=True)
class ArrivalForecast:
    """Forecast of the arrival rate by Holt's smoothing: level and trend over minutes, no time of day."""

    level: float = 0.0
    trend: float = 0.0
    """Change of the rate per second."""
    seen_s: float = 0.0

    def updated(self, count: float, over_s: float) -> "ArrivalForecast":
        """Return the forecast after `count` arrivals within `over_s` > 0.

        Early observations weigh equally.
        """
        seen_s = self.seen_s + over_s
        weight = max(1 - math.exp(-over_s / LEVEL_S), over_s / seen_s)
        expected = max(0.0, self.level + self.trend * over_s)
        level = expected + weight * (count / over_s - expected)
        trend = 0.0
        if seen_s > LEVEL_S:
            trend_weight = 1 - math.exp(-over_s / TREND_S)
            trend = self.trend + trend_weight * ((level - self.level) / over_s - self.trend)
        return ArrivalForecast(level, trend, seen_s)

    def at(self, ahead_s: float) -> float:
        """Return the rate predicted for `ahead_s` from now, at least the present rate.

        A lower prediction is not used: a pool that waits for less load would be late twice.
        """
        return min(MOST_GROWTH * self.level, max(self.level, self.level + self.trend * ahead_s))


@dataclass(frozen=True, slots=True)
class Estimates:
    """Estimates of one model's workers and requests."""

    arrivals: ArrivalForecast
    """Requests per second."""
    prompt_tokens: Ratio
    """Prompt tokens per request."""
    computed_share: Ratio
    """Share of prompt tokens that no cache held."""
    prefill_tokens_per_s: Ratio
    """Prompt tokens per second of a busy prefill worker."""
    prefill_s: Ratio
    """Seconds of a busy prefill worker per request."""
    stream_blocks: Ratio
    """KV blocks per running stream."""
    itl: LinearFit
    """Inter-token latency in seconds, by streams of a decode worker. Never changed in place."""
    running: float = 0.0
    """Recent number of running streams."""
    ttft_missed: Ratio = Ratio(0.0, MISSES, MISSES)
    """Share of requests that missed the TTFT SLO, refused requests included."""
    itl_missed: Ratio = Ratio(0.0, MISSES, MISSES)

    @classmethod
    def priors(cls, config: PolicyConfig) -> "Estimates":
        return cls(
            arrivals=ArrivalForecast(),
            prompt_tokens=Ratio.prior(config.prompt_tokens, REQUESTS),
            computed_share=Ratio.prior(1.0, REQUESTS * config.prompt_tokens),
            prefill_tokens_per_s=Ratio.prior(config.prefill_tokens_per_s, BUSY_S),
            prefill_s=Ratio.prior(config.prompt_tokens / config.prefill_tokens_per_s, REQUESTS),
            stream_blocks=Ratio(0.0, LEAST, REQUESTS),  # nothing is known: the first observation decides
            itl=LinearFit(config.step_s, config.stream_delay_s),
        )

    def updated(self, before: Observation, now: Observation) -> "Estimates":
        """Return the estimates after the time between two observations."""
        over_s = now.at_s - before.at_s
        new: Counters = now.counters.since(before.counters)
        busy_s = over_s * (before.prefill.busy + now.prefill.busy) / 2
        weight = 1 - math.exp(-over_s / RUNNING_S)
        computed = min(new.ended_tokens, new.lent_tokens + new.own_tokens)
        return replace(
            self,
            arrivals=self.arrivals.updated(new.arrived, over_s),
            prompt_tokens=self.prompt_tokens.updated(new.arrived_tokens, new.arrived),
            computed_share=self.computed_share.updated(computed, new.ended_tokens),
            prefill_tokens_per_s=self.prefill_tokens_per_s.updated(new.lent_tokens, busy_s),
            prefill_s=self.prefill_s.updated(busy_s, new.first_tokens),
            stream_blocks=self.stream_blocks.updated(now.decode.used_blocks, now.decode.running),
            itl=_itl_seen(self.itl, before, now, new),
            running=self.running + weight * (now.decode.running - self.running),
            ttft_missed=self.ttft_missed.updated(new.ttft_missed + new.refused, new.first_tokens + new.refused),
            itl_missed=self.itl_missed.updated(new.itl_missed, new.streams),
        )


def _itl_seen(line: LinearFit, before: Observation, now: Observation, new: Counters) -> LinearFit:
    """Return the ITL line after requests that ended in between, at the mean number of streams."""
    workers = before.decode.serving + now.decode.serving
    if not workers or new.streams < 1 or new.itl_sum_s <= 0:
        return line
    learnt = copy.copy(line)
    learnt.observe((before.decode.running + now.decode.running) / workers, new.itl_sum_s / new.streams)
    return learnt


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
