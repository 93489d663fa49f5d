"""The shell of admission: futures, cancellation, the timer. Who goes when is tested in test_admission_*.py."""

import asyncio
from typing import Any

import pytest

from cluster.errors import Overloaded, Unavailable
from protos import membership_pb2 as pb
from router.admission.config import AdmissionConfig, TenantPolicy
from router.admission.dispatcher import Dispatcher
from router.admission.limits.tenant_limits import TenantLimits
from router.admission.request import RequestInfo
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import WorkerRecord
from router.placement.rates import Priors
from support.virtual_loop import settle

PRIORS = Priors(1000, 100, 1e6, 0.01, 0.001, 0.001)


def demand(num_blocks: int) -> Demand:
    return Demand(num_tokens=4, num_usable_blocks=0, num_total_blocks=num_blocks, block_tokens=4, block_bytes=100)


class Clock:
    """Virtual: tests move it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def info(priority: int = 0, **options: Any) -> RequestInfo:
    return RequestInfo("", priority, 0.0, **options)


def make(available: int, **config: Any) -> tuple[Fleet, WorkerRecord, Dispatcher]:
    fleet = Fleet("router", PRIORS)
    worker = fleet.joined(pb.Hello(worker_id="d0", role=pb.ROLE_DECODE))
    fleet.reported(worker, pb.LoadReport(available_blocks=available, num_blocks=100))
    return fleet, worker, Dispatcher(fleet, AdmissionConfig(**config), clock=Clock())


def asking(dispatcher: Dispatcher, num_blocks: int) -> "asyncio.Future[Any]":
    return asyncio.ensure_future(dispatcher.place(info(), demand(num_blocks), []))


async def test_what_fits_starts_at_once_and_counts() -> None:
    _, _, dispatcher = make(available=10)
    placed, decision = await asking(dispatcher, 6)
    assert decision.decode_id == "d0"
    assert placed.sequence == 1
    second = asking(dispatcher, 6)
    await settle()
    assert not second.done()
    second.cancel()


async def test_what_has_no_room_lets_others_pass_and_starts_at_an_end() -> None:
    _, _, dispatcher = make(available=10)
    running, _ = await asking(dispatcher, 8)
    large, small = asking(dispatcher, 9), asking(dispatcher, 1)
    await settle()
    assert small.done()
    assert not large.done()
    dispatcher.ended(running)
    await settle()
    assert large.done()


async def test_a_full_queue_refuses() -> None:
    _, _, dispatcher = make(available=0, max_queued=1)
    waiting = asking(dispatcher, 1)
    await settle()
    with pytest.raises(Overloaded):
        await asking(dispatcher, 1)
    waiting.cancel()


async def test_a_client_that_leaves_frees_its_place() -> None:
    fleet, worker, dispatcher = make(available=0)
    first = asking(dispatcher, 5)
    second = asking(dispatcher, 1)
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
    waiting = asking(dispatcher, 5)
    await settle()
    fleet.reported(worker, pb.LoadReport(available_blocks=5, num_blocks=100))
    dispatcher.kick()
    waiting.cancel()
    await settle()
    assert [view.available_blocks for view in fleet.views()] == [5]


async def test_the_timer_refuses_what_nobody_could_hold() -> None:
    """Of its own, with no event from anywhere; the clock is the loop's here."""
    fleet = Fleet("router", PRIORS)
    dispatcher = Dispatcher(fleet, AdmissionConfig(no_worker_grace_s=5), clock=asyncio.get_running_loop().time)
    with pytest.raises(Unavailable, match="no decode worker"):
        await dispatcher.place(RequestInfo("", 0, 0.0), demand(5), [])
    assert dispatcher.num_waiting == 0
    assert dispatcher.admission.num_refused == {"no worker": 1}


async def test_limits_of_a_tenant_and_what_is_given_back() -> None:
    clock = Clock()
    policy = TenantPolicy(quota_tokens=100, quota_window_s=60, tokens_per_minute=6000)
    config = AdmissionConfig(tenants={"a": policy})
    tenant_limits = TenantLimits(config, clock=clock, wall_clock=clock)
    clock.now = 90.0
    charge = await tenant_limits.enter("a", 80)
    with pytest.raises(Overloaded, match="'a' is at its quota_tokens of 100 per 60 s") as caught:
        await tenant_limits.enter("a", 21)
    assert caught.value.retry_after_s == 30
    tenant_limits.leave(charge, lambda: 30)
    await settle()
    second = await tenant_limits.enter("a", 70)
    with pytest.raises(Overloaded):
        await tenant_limits.enter("a", 1)
    clock.now = 121.0
    await tenant_limits.enter("a", 100)
    tenant_limits.leave(second, lambda: 0)  # of a window that is over: nothing comes back
    await settle()
    with pytest.raises(Overloaded):
        await tenant_limits.enter("a", 1)
    with pytest.raises(Overloaded, match="never") as caught:
        await tenant_limits.enter("a", 101)
    assert caught.value.permanent
    assert tenant_limits.num_refused == {"quota_tokens": 4}
