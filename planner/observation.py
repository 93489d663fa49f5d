"""The state of all routers at one moment, as the planner sees it.

Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.settings import Role
from protos import inference_pb2 as pb

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
