"""What a planner sees at one moment, of all routers together. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.roles import Role
from protos import inference_pb2 as pb

MOST_ROUTERS = 256
"""That are remembered."""


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """The workers of one role."""

    serving: int = 0
    """Joined, heard of, and to stay."""
    starting: int = 0
    """On their way: the executor has asked for them."""
    busy: int = 0
    """Of the serving ones: such as have prompt tokens to compute."""
    queued_tokens: int = 0
    """Of prompts, at the workers."""
    running: int = 0
    """Requests they have."""
    num_blocks: int = 0
    """Of KV."""
    used_blocks: int = 0
    """Of these: what a new request could not have."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What only grows."""

    arrived: int = 0
    arrived_tokens: int = 0
    ended_tokens: int = 0
    """Of prompts of requests that ended well; of these, those computed, by lenders and by decode workers."""
    lent_tokens: int = 0
    own_tokens: int = 0
    refused: int = 0
    first_tokens: float = 0
    ttft_missed: float = 0
    """Of those: later than the SLO."""
    streams: float = 0
    """Requests whose ITL is known."""
    itl_missed: float = 0
    itl_sum_s: float = 0.0

    def since(self, before: "Counters") -> "Counters":
        """What was added."""
        return Counters(*(max(0, getattr(self, name) - getattr(before, name)) for name in self.__slots__))

    def plus(self, more: "Counters") -> "Counters":
        return Counters(*(getattr(self, name) + getattr(more, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Observation:
    """At one moment."""

    at_s: float
    """Of any clock that does not go back."""
    prefill: PoolObservation = PoolObservation()
    decode: PoolObservation = PoolObservation()
    waiting: int = 0
    """Requests in the routers' lines."""
    waiting_tokens: int = 0
    """Of their prompts."""
    counters: Counters = field(default_factory=Counters)

    def pool(self, role: Role) -> PoolObservation:
        return self.prefill if role == "prefill" else self.decode


class Tallies:
    """Counters of all routers together. One that does not answer for a while has still counted what it has, and one
    that is new, or has started again, counts from when it was first heard."""

    def __init__(self) -> None:
        self.total = Counters()
        self._last: dict[str, Counters] = {}
        """By router; the one that was heard last, last."""

    def heard(self, router: str, counters: Counters) -> None:
        """`router` is another one for each start of it."""
        before = self._last.pop(router, counters)
        self._last[router] = counters
        self.total = self.total.plus(counters.since(before))
        if len(self._last) > MOST_ROUTERS:
            del self._last[next(iter(self._last))]


def counters_of(status: pb.ModelStatus, ttft_s: float, itl_s: float) -> Counters:
    """As one router has them, of one model; with the SLO."""
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
    """What the routers that answer say of one model. A worker is the same to all of them; requests each has its own."""
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
    """How many took longer; within the bucket of the limit, by its part of the bucket."""
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
    heard = [worker for worker in workers if worker.role == role and worker.heard and not worker.draining]
    return PoolObservation(
        serving=len(heard),
        starting=starting.get(role, 0),
        busy=sum(worker.queued_prefill_tokens > 0 for worker in heard),
        queued_tokens=sum(worker.queued_prefill_tokens for worker in heard),
        running=sum(worker.running for worker in heard),
        num_blocks=sum(worker.num_blocks for worker in heard),
        used_blocks=sum(max(0, worker.num_blocks - worker.available_blocks) for worker in heard),
    )
