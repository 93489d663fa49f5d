"""What a process that was told to stop waits for, channels that are let go, and drain across the wire and placement."""

import asyncio
from typing import Any

import grpc
import numpy as np

from cluster.errors import AlreadyExists, Draining, ServiceError, Unavailable
from cluster.network.error_status import from_rpc_error, to_status
from cluster.network.rpc import Channels
from cluster.process.life import Drain
from router.placement.demand import Demand
from router.placement.place import explain, place
from router.placement.rates import Priors, Rates
from router.placement.worker_table import Hits, WorkerTable, WorkerView


async def test_drain_is_idle_when_its_calls_are_over() -> None:
    drain, ended = Drain(), list[str]()
    assert await drain.idle(0)
    with drain.holding(lambda: ended.append("a")):
        drain.begin()
        assert (drain.draining, drain.over, drain.num_calls) == (True, False, 1)
        assert not await drain.idle(0)
        waiting = asyncio.ensure_future(drain.idle(60))
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting
    assert ended == []


async def test_what_is_under_way_at_the_end_is_told_once_and_what_comes_later_too() -> None:
    drain, ended = Drain(), list[str]()
    with drain.holding(lambda: ended.append("a")), drain.holding(lambda: ended.append("b")):
        assert drain.end_all() == 2
        assert ended == ["a", "b"]
        with drain.holding(lambda: ended.append("late")):
            assert ended == ["a", "b", "late"]
    assert drain.num_calls == 0
    assert await drain.idle(0)


class FakeChannel:
    closed = False

    async def close(self) -> None:
        self.closed = True


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_channel_goes_with_its_worker_but_not_under_a_call() -> None:
    made: list[Any] = []

    def connect(address: str, trust: object) -> Any:
        made.append(FakeChannel())
        return made[-1]

    channels = Channels(idle_s=3600, connect=connect)
    with channels.using("a:1") as first, channels.using("a:1") as second:
        assert first is second
        channels.departed("a:1")
        await turns()
        assert not made[0].closed
    await turns()
    assert made[0].closed
    assert channels.addresses == []
    with channels.using("a:1"):
        assert len(made) == 2
    await turns()
    assert channels.addresses == ["a:1"], "kept for the next call"
    channels.departed("a:1")
    with channels.using("a:1"):  # it came back before the channel was closed
        await turns()
    await turns()
    assert not made[1].closed
    channels.departed("a:1")
    channels.departed("nobody:1")
    await turns()
    assert made[1].closed


async def test_a_channel_that_nobody_uses_is_closed_after_a_while() -> None:
    made = FakeChannel()
    channels = Channels(idle_s=0.0, connect=lambda *_: made)  # type: ignore[arg-type, return-value]
    with channels.using("a:1"):
        await turns()
        assert not made.closed
    await turns()
    assert made.closed


def over_the_wire(error: ServiceError) -> ServiceError:
    status = to_status(error)
    trailers = grpc.aio.Metadata(*status.trailing_metadata)
    return from_rpc_error(grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailers, details=status.details))


def test_draining_and_a_taken_name_keep_their_types_across_the_wire() -> None:
    assert type(over_the_wire(Draining("leaves"))) is Draining
    assert type(over_the_wire(Unavailable("gone"))) is Unavailable
    taken = over_the_wire(AlreadyExists("both a:1 and b:2", "worker_id"))
    assert type(taken) is AlreadyExists
    assert taken.field == "worker_id"


DEMAND = Demand(num_tokens=33, num_usable_blocks=8, num_total_blocks=10, block_tokens=4, block_bytes=100)


def workers_of(**draining: bool) -> WorkerTable:
    return WorkerTable.of(
        [
            WorkerView(name, name.startswith("d"), b"model", 0, 0, 0, 100, 100, draining=drains)
            for name, drains in draining.items()
        ]
    )


def test_a_draining_worker_gets_nothing_but_can_be_read() -> None:
    rates = Rates.uniform(3, Priors(1000, 10, 1e6, 0.001, 0.001, 0.001))
    workers = workers_of(d0=True, d1=False, p0=True)
    hits = Hits.of(workers, {"d0": 6, "p0": 2})
    decision = place(DEMAND, workers, hits, rates)
    assert (decision.decode_id, decision.lender_id, decision.lender_computes) == ("d1", "d0", False)
    candidates = explain(DEMAND, workers, hits, rates)
    assert {candidate.decode_id for candidate in candidates} == {"d1"}
    assert not any(candidate.lender_computes for candidate in candidates)
    assert len(candidates) == decision.num_candidates
    everybody_leaves = workers_of(d0=True, d1=True, p0=False)
    assert place(DEMAND, everybody_leaves, hits, rates) is None
    assert np.array_equal(everybody_leaves.draining, [True, True, False])
