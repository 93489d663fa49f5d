"""Who waits, who starts, and in which order."""

import asyncio

import pytest

from cluster.errors import Overloaded
from protos import membership_pb2 as pb
from router.demand import Demand
from router.dispatch import Dispatcher
from router.fleet import Fleet, Worker
from router.rates import Priors

PRIORS = Priors(1000, 100, 1e6, 0.01, 0.001, 0.001)


def demand(num_blocks: int) -> Demand:
    return Demand(num_tokens=4, num_usable_blocks=0, num_total_blocks=num_blocks, block_tokens=4, block_bytes=100)


def make(available: int, max_queued: int = 10) -> tuple[Fleet, Worker, Dispatcher]:
    fleet = Fleet("router", PRIORS)
    worker = fleet.joined(pb.Hello(worker_id="d0", role=pb.ROLE_DECODE))
    fleet.reported(worker, pb.LoadReport(available_blocks=available, num_blocks=100))
    return fleet, worker, Dispatcher(fleet, max_queued)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_fits_starts_at_once_and_counts() -> None:
    _, _, dispatcher = make(available=10)
    placed, decision = await dispatcher.place(demand(6), [], 0)
    assert decision.decode_id == "d0"
    assert placed.sequence == 1
    second = asyncio.ensure_future(dispatcher.place(demand(6), [], 0))
    await settle()
    assert not second.done()
    second.cancel()


async def test_the_first_in_line_keeps_its_turn() -> None:
    fleet, _, dispatcher = make(available=10)
    running, _ = await dispatcher.place(demand(8), [], 0)
    large = asyncio.ensure_future(dispatcher.place(demand(9), [], 0))
    small = asyncio.ensure_future(dispatcher.place(demand(1), [], 0))
    await settle()
    assert not small.done(), "a small request must not starve the large one before it"
    fleet.ended(running)
    dispatcher.kick()
    await settle()
    assert large.done()
    assert small.done()


async def test_priority_goes_first_and_arrival_decides_ties() -> None:
    fleet, worker, dispatcher = make(available=0)
    order: list[str] = []

    async def wait(name: str, priority: int) -> None:
        placed, _ = await dispatcher.place(demand(1), [], priority)
        order.append(name)
        fleet.ended(placed)

    tasks = [asyncio.ensure_future(wait(name, priority)) for name, priority in [("a", 0), ("b", 5), ("c", 0), ("d", 5)]]
    await settle()
    for available in (1, 1, 1, 1):
        fleet.reported(worker, pb.LoadReport(available_blocks=available, num_blocks=100))
        dispatcher.kick()
        await settle()
    await asyncio.gather(*tasks)
    assert order == ["b", "d", "a", "c"]


async def test_a_full_queue_refuses() -> None:
    _, _, dispatcher = make(available=0, max_queued=1)
    waiting = asyncio.ensure_future(dispatcher.place(demand(1), [], 0))
    await settle()
    with pytest.raises(Overloaded):
        await dispatcher.place(demand(1), [], 0)
    waiting.cancel()


async def test_a_client_that_leaves_frees_its_place() -> None:
    fleet, worker, dispatcher = make(available=0)
    first = asyncio.ensure_future(dispatcher.place(demand(5), [], 0))
    second = asyncio.ensure_future(dispatcher.place(demand(1), [], 0))
    await settle()
    first.cancel()
    await settle()
    assert dispatcher.num_waiting == 1
    fleet.reported(worker, pb.LoadReport(available_blocks=1, num_blocks=100))
    dispatcher.kick()
    await settle()
    assert second.done()


async def test_a_client_that_leaves_as_it_is_placed_gives_the_placement_back() -> None:
    fleet, worker, dispatcher = make(available=0)
    waiting = asyncio.ensure_future(dispatcher.place(demand(5), [], 0))
    await settle()
    fleet.reported(worker, pb.LoadReport(available_blocks=5, num_blocks=100))
    dispatcher.kick()
    waiting.cancel()
    await settle()
    assert [view.available_blocks for view in fleet.views()] == [5]
