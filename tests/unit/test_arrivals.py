"""Arrivals: requests are charged and counted before they are read, refused ones too."""

import asyncio
import gc
import weakref

import pytest

from cluster.errors import Overloaded
from router.admission.arrivals import MAX_LATE_REFUSALS, PROMPT_REFUSALS_PER_S, Arrivals, RefusalPace
from router.admission.config import AdmissionConfig, TenantPolicy
from router.admission.limits.tenant_limits import TenantLimits
from router.admission.refusals import Reason, Refusal


def arrivals_of(**settings: object) -> tuple[Arrivals, TenantLimits]:
    config = AdmissionConfig.model_validate(settings)
    limits = TenantLimits(config, clock=lambda: 100.0)
    return Arrivals(config, limits), limits


def test_a_request_that_is_refused_after_it_was_read_stays_charged() -> None:
    arrivals, _ = arrivals_of(tenants={"m": TenantPolicy(requests_per_s=1, burst=2, tokens_per_minute=100)})
    for _ in range(2):
        with pytest.raises(ValueError, match="too long"), arrivals.arriving("m"):
            raise ValueError("too long")
    with pytest.raises(Overloaded, match="requests_per_s"), arrivals.arriving("m"):
        pytest.fail("it was read")
    assert arrivals.requests.total == 0


def test_one_tenant_at_each_bound_leaves_room_for_another_one() -> None:
    arrivals, limits = arrivals_of(max_queued=8, max_queued_per_tenant=4, max_bodies_mib=4)
    held = [arrivals.arriving("m") for _ in range(4)]
    entered = [each.__enter__() for each in held]
    with pytest.raises(Overloaded, match="4 requests of tenant 'm'"), arrivals.arriving("m"):
        pytest.fail("it was read")
    entered[0].hold(1 << 20)
    with pytest.raises(Refusal, match="bytes of requests of tenant 'm'"):
        entered[1].hold(1)
    with arrivals.arriving("alice") as alice:
        alice.hold(1 << 20)
        assert arrivals.body_bytes.total == 2 << 20
    assert arrivals.body_bytes.total == 1 << 20
    with pytest.raises(Overloaded, match="bytes of requests of tenant 'alice'"), arrivals.arriving("alice") as alice:
        alice.hold((1 << 20) + 1)
    assert limits.num_refused == {Reason.TENANT_QUEUE_FULL: 2}
    entered[1].queued()
    entered[1].queued()
    assert arrivals.requests.used("m") == 3
    for each in held:
        each.__exit__(None, None, None)
    assert arrivals.requests.total == 0


def test_tokens_that_were_read_of_a_refused_request_are_charged() -> None:
    _, limits = arrivals_of(tenants={"m": TenantPolicy(tokens_per_minute=100)})
    limits.charge_refused("m", 60)
    limits.tenants.check("m", 40, 1, 100.0)
    with pytest.raises(Exception, match="tokens_per_minute"):
        limits.tenants.check("m", 41, 1, 100.0)
    limits.charge_refused("m", 1000)  # no more than there is
    limits.charge_refused("m", 1000)


def test_sequences_count_against_max_running() -> None:
    _, limits = arrivals_of(tenants={"m": TenantPolicy(max_running=4)})
    tenants = limits.tenants
    with pytest.raises(Exception, match="5 sequences: it can never be admitted"):
        tenants.check("m", 1, 5, 0.0)
    tenants.started("m", 3, 0.0)
    assert tenants.may_start("m", 1)
    assert not tenants.may_start("m", 2)
    tenants.ended("m", 3)
    assert tenants.may_start("m", 4)


class Kept:
    """An object that is held by the stack of a refused request."""


def test_a_refused_request_is_freed_at_once() -> None:
    """Its body would otherwise stay until a collection of garbage, which is rare and then takes long."""
    arrivals, _ = arrivals_of(max_bodies_mib=4, tenants={"m": TenantPolicy(requests_per_s=1)})
    kept: list[weakref.ref[Kept]] = []

    def refused(tenant: str, num_bytes: int) -> None:
        body = Kept()
        kept.append(weakref.ref(body))
        with pytest.raises(Overloaded), arrivals.arriving(tenant) as arrival:
            arrival.hold(num_bytes)

    gc.collect()
    gc.disable()
    try:
        with arrivals.arriving("m"):
            refused("m", 1)
        refused("alice", 10 << 20)
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()


async def is_late(pace: RefusalPace, error: Overloaded) -> bool:
    """Return whether the refusal waits, and cancel it."""
    waiting = asyncio.ensure_future(pace.wait(error))
    await asyncio.sleep(0)
    return waiting.cancel()


async def test_refusals_of_a_tenant_that_keeps_asking_come_late() -> None:
    now = 100.0
    pace = RefusalPace(lambda: now)
    error = Overloaded("too many", limit=("m", "requests_per_s: 1"))
    assert [await is_late(pace, error) for _ in range(PROMPT_REFUSALS_PER_S + 2)] == [False] * PROMPT_REFUSALS_PER_S + [
        True
    ] * 2
    assert not await is_late(pace, Overloaded("too many", limit=("alice", "requests_per_s: 1")))
    assert not await is_late(pace, Overloaded("the cluster is full"))
    now += 1
    assert not await is_late(pace, error)


async def test_refusals_beyond_a_bound_do_not_wait() -> None:
    pace = RefusalPace(lambda: 100.0)
    error = Overloaded("too many", limit=("m", "requests_per_s: 1"))
    late = [asyncio.ensure_future(pace.wait(error)) for _ in range(PROMPT_REFUSALS_PER_S + MAX_LATE_REFUSALS + 1)]
    await asyncio.sleep(0)
    assert sum(not each.done() for each in late) == MAX_LATE_REFUSALS
    for each in late:
        each.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    again = asyncio.ensure_future(pace.wait(error))
    await asyncio.sleep(0)
    assert not again.done(), "those that are gone do not count"
    again.cancel()
