"""Admission, case by case: who is refused, when, and with which words."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import DeadlineExceeded, Overloaded
from protos import membership_pb2 as pb
from router.admission.config import TenantPolicy
from router.admission.request import QueuedRequest, RequestInfo
from router.placement.demand import Demand
from support.admission_site import BLOCK, Site, demand_of

# --------------------------------------------------------------------------------------- predicted misses


def test_a_predicted_miss_is_refused_at_once() -> None:
    """The class has been served 40 tokens a second while it waited; 400 tokens stand before this one."""
    site = Site([10])
    running = site.ask(10)
    waiting = [site.ask(10) for _ in range(20)]
    for _ in range(10):
        site.wait(1)
        running = site.next(running)
    del waiting
    patient = site.ask(10, first_token_by=14)
    assert patient in site.waiting, "due before those that are in no hurry, it goes first"
    late = site.ask(10, first_token_by=15)
    assert late in site.waiting
    for _ in range(9):
        site.ask(10, first_token_by=14)
    hasty = site.ask(10, first_token_by=5)
    assert hasty in site.waiting, "before all of them"
    last = site.ask(10, first_token_by=14.5)
    assert last in site.waiting or site.refusal(last) is not None
    refused = [site.ask(10, first_token_by=6) for _ in range(12)]
    refusals = [site.refusal(waiting) for waiting in refused]
    assert refusals[0] is None
    error = refusals[-1].error
    assert isinstance(error, Overloaded)
    assert error.retry_after_s is not None
    assert 0 < error.retry_after_s < 30
    assert refusals[-1].reason == "predicted miss"


def test_what_one_that_came_now_would_wait_is_predicted_by_what_waits() -> None:
    """40 tokens a second were started while others waited: those of its class, and of the classes above."""
    site = Site([10])

    def wait_s(priority: int) -> float:
        return site.admission.expected_wait_s(priority, demand_of(10), site.now)

    running = site.ask(10)
    assert wait_s(0) == 0, "nothing waits"
    waiting = [site.ask(10) for _ in range(20)]
    assert wait_s(0) == 0, "nothing is known"
    for _ in range(10):
        site.wait(1)
        running = site.next(running)
    assert site.admission.num_waiting == len(waiting) - 10
    assert 8 < wait_s(0) < 12, "ten of 40 tokens each, started at one a second"
    assert wait_s(-1) == 0, "none of that class ever waited: nothing is known"
    assert wait_s(1) == 0, "nothing stands before it"


def test_who_can_no_longer_make_it_is_refused_then_and_not_at_its_deadline() -> None:
    site = Site([10], lenders=1)
    site.ask(10)
    waits = site.ask(10, usable=9, first_token_by=2)
    ttft_s = waits.least_ttft_s
    assert 0.03 < ttft_s < 0.1, "36 tokens at 1,000 a second by the lender, and the last ones"
    site.wait(2 - ttft_s - 0.001)
    assert waits in site.waiting
    site.wait(0.002)
    refusal = site.refused_for(waits)
    assert refusal.reason == "too late"
    assert isinstance(refusal.error, Overloaded)
    assert refusal.error.retry_after_s


def test_the_whole_deadline_counts_the_stream_too() -> None:
    """Streams were seen to take 10 s for 40 tokens of output; one that must end in 15 s must start in 5."""
    site = Site([])
    site.workers["d0"] = site.fleet.joined(
        pb.Hello(worker_id="d0", role=pb.ROLE_DECODE, model_fingerprint=b"m", reserve_output_tokens=400)
    )
    site.report("d0", 11)
    demand = Demand(4, 0, 11, BLOCK, 100, (4,), 44)

    def arrive(deadline: float) -> QueuedRequest:
        return site.arrive(RequestInfo("", 0, site.now, site.now + deadline), demand)

    for _ in range(100):
        stream = arrive(1000)
        site.fleet.started(site.running[stream])
        site.wait(10)
        site.end(stream)
    arrive(1000)
    hasty, patient = arrive(9.9), arrive(15)
    assert hasty in site.waiting, "it may stop before it has said all that it may say"
    site.wait(4.9)
    assert patient in site.waiting
    site.wait(0.2)
    assert site.refusal(patient) is not None, "it could have been in time"
    assert hasty in site.waiting
    site.wait(5)
    assert site.refusal(hasty) is not None


def test_what_a_request_may_say_is_not_what_it_will_say() -> None:
    """Streams that may have 100 tokens last for 10 s. Behind a queued prompt comes one that may have 1,900."""
    site = Site([10_000])

    def arrive(output: int, deadline: float) -> QueuedRequest:
        demand = Demand(4, 0, 1 + output // 4, BLOCK, 100, (4,), 4 + output)
        return site.arrive(RequestInfo("", 0, site.now, site.now + deadline), demand)

    for _ in range(100):
        stream = arrive(100, 1000)
        site.fleet.started(site.running[stream])
        site.wait(10)
        site.end(stream)
    site.report("d0", 10_000, queued_tokens=100)
    assert site.is_running(arrive(1900, deadline=15))
    refusal = site.refused_for(arrive(100, deadline=10.5))
    assert "within 0.5 s" in str(refusal.error)


def test_a_stream_under_way_waits_until_its_very_deadline() -> None:
    site = Site([10])
    site.ask(10)
    info = RequestInfo("", 0, 0.0, deadline=5, first_token_by=0.1, streaming=True, num_placed=1)
    resumed = site.ask(10, info=info)
    site.wait(4.9)
    assert resumed in site.waiting
    site.wait(0.2)
    refusal = site.refused_for(resumed)
    assert isinstance(refusal.error, DeadlineExceeded)


@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9), st.floats(1e-6, 10), st.integers(1, 10))
def test_an_idle_cluster_always_starts(rate: float, other_rate: float, limit_s: float, blocks: int) -> None:
    """However wrong what was learnt is."""
    site = Site([10], lenders=1)
    site.fleet.rates.prefill_tokens_per_s[:] = rate
    site.fleet.rates.decode_prefill_tokens_per_s[:] = other_rate
    first = site.ask(1)
    site.admission.forecast.ended(first, first.num_output_tokens / rate)
    site.end(first)
    for priority in (0, -1):
        waiting = site.ask(blocks, usable=blocks - 1, priority=priority, first_token_by=limit_s, deadline=limit_s)
        assert site.is_running(waiting)
        site.end(waiting)


def test_a_wrong_forecast_heals() -> None:
    """A long stop taught that the class is served 1 token a second. Its first in line stays and is measured."""
    site = Site([10])
    running = site.ask(10)
    site.ask(10)
    site.wait(1000)
    running = site.next(running)
    for _ in range(200):  # now 400 tokens a second
        site.ask(10, first_token_by=1)
        site.ask(10, first_token_by=1)
        site.wait(0.1)
        running = site.next(running)
    recent = site.started[-40:]
    assert all(start.waiting.queued_at > 1000 for start in recent), "served one after the other all along"
    assert site.admission.num_waiting >= 5, "and waits of tenths of a second are believed in again"


# ------------------------------------------------------------------------------------------- bounded queues


def test_a_full_queue_refuses_the_newcomer_or_the_last_of_the_lowest_class() -> None:
    site = Site([10], max_queued=3)
    site.ask(10)
    low = [site.ask(10, tenant, priority=-1) for tenant in ("a", "a", "b")]
    newcomer = site.ask(10, priority=-1)
    refusal = site.refused_for(newcomer)
    assert refusal.reason == "queue full"
    high = site.ask(10, priority=1)
    assert high in site.waiting
    refusal = site.refusal(low[1])
    assert refusal is not None, "the last of the tenant with most"
    assert refusal.reason == "displaced"
    assert isinstance(refusal.error, Overloaded)
    assert refusal.error.retry_after_s
    assert Counter(waiting.info.priority for waiting in site.waiting) == {1: 1, -1: 2}


def test_a_tenants_full_queue() -> None:
    site = Site([10], max_queued_per_tenant=2)
    site.ask(10)
    mine = [site.ask(10, "a", priority=priority) for priority in (0, -1)]
    others = site.ask(10, "b", priority=-1)
    refusal = site.refused_for(site.ask(10, "a", priority=-1))
    assert refusal.reason == "tenant's queue full"
    assert "'a'" in str(refusal.error)
    assert site.ask(10, "a") in site.waiting
    assert site.refusal(mine[1]) is not None
    assert others in site.waiting


def test_who_starts_at_once_needs_no_place_in_the_queue() -> None:
    site = Site([10], max_queued=1)
    site.ask(9)
    site.ask(9)
    assert site.is_running(site.ask(1))


# --------------------------------------------------------------------------------- limits and refusals of workers


def test_max_running_holds_back_a_tenant_and_nobody_else() -> None:
    site = Site([10], tenants={"a": TenantPolicy(max_running=1)}, max_passed_s=0.5)
    first, second = site.ask(1, "a"), site.ask(1, "a")
    other = site.ask(1, "b")
    assert [site.is_running(waiting) for waiting in (first, second, other)] == [True, False, True]
    site.wait(2)
    assert not site.admission.reserved_workers(), "room is not what it lacks"
    site.end(first)
    assert site.is_running(second)


def test_a_worker_that_refused_is_not_asked_again_at_once() -> None:
    site = Site([10])
    info = RequestInfo("", 0, 0.0)
    waiting = site.ask(5, info=info)
    times = []
    for _ in range(6):
        times.append(site.now)
        site.admission.refused_by_worker(site.running[waiting], site.now)
        site.end(waiting)
        waiting = site.ask(5, info=info)
        assert not site.is_running(waiting)
        other = site.ask(5)
        assert not site.is_running(other), "nor by others, for as much"
        site.cancel(other)
        while not site.is_running(waiting):
            site.wait(0.01)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(pause >= 0.1 - 1e-9 for pause in pauses)
    assert pauses[-1] >= 0.16 - 1e-9, "and ever longer"
    assert site.fleet.snapshot.available_blocks[0] == 5


def test_a_report_ends_a_workers_refusal_but_the_claim_pauses() -> None:
    site = Site([10])
    info = RequestInfo("", 0, 0.0)
    waiting = site.ask(5, info=info)
    site.admission.refused_by_worker(site.running[waiting], site.now)
    site.end(waiting)
    waiting = site.ask(5, info=info)
    site.report("d0", 10)
    assert not site.is_running(waiting)
    assert site.is_running(site.ask(5))
    site.wait(0.011)
    assert site.is_running(waiting)


def test_refusals_by_workers_are_bounded() -> None:
    site = Site([10], max_refusals=2)
    info = RequestInfo("", 0, 0.0)
    for attempt in range(3):
        waiting = site.ask(5, info=info)
        site.wait(1)
        if attempt < 2:
            site.admission.refused_by_worker(site.running[waiting], site.now)
        else:
            with pytest.raises(Overloaded) as caught:
                site.admission.refused_by_worker(site.running[waiting], site.now)
            assert caught.value.retry_after_s
        site.end(waiting)


def test_who_comes_back_keeps_its_place_and_is_not_displaced() -> None:
    site = Site([10], max_queued=2)
    info = RequestInfo("", -1, site.now)
    waiting = site.ask(10, info=info)
    site.wait(1)
    others = [site.ask(10, priority=-1), site.ask(10, priority=-1)]
    site.admission.refused_by_worker(site.running[waiting], site.now)
    site.report("d0", 0)
    site.end(waiting)
    again = site.ask(10, info=info)
    assert all(other in site.waiting for other in [*others, again])
    high = site.ask(10, priority=1)
    assert high in site.waiting
    assert again in site.waiting
    assert site.refusal(others[1]) is not None
    site.wait(1)
    site.report("d0", 10)
    assert site.is_running(high)
    site.end(high)
    site.report("d0", 10)
    assert site.is_running(again)
