"""What a planner sees at one moment, of all routers together. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from protos import inference_pb2 as pb

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class PoolSeen:
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
    """What grows only, but for a router that starts again."""

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
        """What was added; nothing of what a router has forgotten."""
        return Counters(*(max(0, getattr(self, name) - getattr(before, name)) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Observation:
    """At one moment."""

    at_s: float
    """Of any clock that does not go back."""
    prefill: PoolSeen = PoolSeen()
    decode: PoolSeen = PoolSeen()
    waiting: int = 0
    """Requests in the routers' lines."""
    waiting_tokens: int = 0
    """Of their prompts."""
    counters: Counters = field(default_factory=Counters)

    def pool(self, role: Role) -> PoolSeen:
        return self.prefill if role == "prefill" else self.decode


def observe(
    at_s: float, routers: Sequence[pb.ModelStatus], starting: dict[Role, int], ttft_s: float, itl_s: float
) -> Observation:
    """What they say together of one model. A worker is the same to all of them; requests each has its own."""
    workers = {worker.worker_id: worker for status in routers for worker in status.workers}
    traffic = [status.traffic for status in routers]
    return Observation(
        at_s=at_s,
        prefill=_pool("prefill", workers.values(), starting),
        decode=_pool("decode", workers.values(), starting),
        waiting=sum(status.waiting for status in routers),
        waiting_tokens=sum(each.waiting_tokens for each in traffic),
        counters=Counters(
            arrived=sum(each.arrived for each in traffic),
            arrived_tokens=sum(each.arrived_tokens for each in traffic),
            ended_tokens=sum(each.ended_tokens for each in traffic),
            lent_tokens=sum(each.lent_tokens for each in traffic),
            own_tokens=sum(each.own_tokens for each in traffic),
            refused=sum(sum(status.refused.values()) for status in routers),
            first_tokens=sum(sum(each.ttft.counts) for each in traffic),
            ttft_missed=sum(missed(each.ttft, ttft_s) for each in traffic),
            streams=sum(sum(each.itl.counts) for each in traffic),
            itl_missed=sum(missed(each.itl, itl_s) for each in traffic),
            itl_sum_s=sum(each.itl.sum_s for each in traffic),
        ),
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


def _pool(role: Role, workers: Iterable[pb.WorkerStatus], starting: dict[Role, int]) -> PoolSeen:
    heard = [worker for worker in workers if worker.role == role and worker.heard and not worker.draining]
    return PoolSeen(
        serving=len(heard),
        starting=starting.get(role, 0),
        busy=sum(worker.queued_prefill_tokens > 0 for worker in heard),
        queued_tokens=sum(worker.queued_prefill_tokens for worker in heard),
        running=sum(worker.running for worker in heard),
        num_blocks=sum(worker.num_blocks for worker in heard),
        used_blocks=sum(max(0, worker.num_blocks - worker.available_blocks) for worker in heard),
    )
