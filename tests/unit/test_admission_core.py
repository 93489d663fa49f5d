"""Admission, case by case: who goes, and where. Who is refused: `test_admission_refusals.py`."""

import pytest

from cluster.errors import Unavailable
from protos import membership_pb2 as pb
from router.admission.request import QueuedRequest, RequestInfo
from router.placement.demand import Demand
from support.admission_site import BLOCK, Site


def started(site: Site) -> list[QueuedRequest]:
    return [start.waiting for start in site.started]


# ------------------------------------------------------------------------------------------------- order


def test_what_fits_starts_at_once() -> None:
    site = Site([10])
    assert site.is_running(site.ask(6))
    assert not site.is_running(site.ask(6))


def test_higher_classes_first_then_earliest_due_then_arrival() -> None:
    site = Site([10])
    first = site.ask(10)
    late = site.ask(10, first_token_by=100)
    early = site.ask(10, first_token_by=50)
    whenever = site.ask(10)
    also = site.ask(10)
    high = site.ask(10, priority=1)
    order = [first, high, early, late, whenever, also]
    for waiting in order:
        site.end(waiting)
    assert started(site) == order


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_lower_classes_have_their_share(share: float) -> None:
    site = Site([100], lower_class_share=share, max_queued_per_tenant=4000)
    running = site.ask(100)
    for priority, count in ((0, 1000), (-1, 230), (-2, 80)):
        for _ in range(count):
            site.ask(100, priority=priority)
    served = {0: 0, -1: 0, -2: 0}
    for _ in range(1000):
        running = site.next(running)
        served[running.info.priority] += 1
    below = served[-1] + served[-2]
    assert below / 1000 == pytest.approx(share, abs=0.01)
    assert served[-2] / below == pytest.approx(share, abs=0.06), "and likewise below"


# -------------------------------------------------------------------------------------- room, and kept workers


def test_what_has_no_room_lets_others_pass_until_a_worker_is_kept_for_it() -> None:
    site = Site([10, 10], max_passed_s=5)
    running = [site.ask(5) for _ in range(4)]
    large = site.ask(10)
    site.end(running.pop())
    site.wait(1)
    small = site.ask(5)
    assert site.is_running(small), "it passes"
    assert not site.admission.reserved_workers()
    site.wait(5)
    ((kept, waiting),) = site.admission.reserved_workers().items()
    assert waiting is large
    on_kept = [waiting for waiting in site.running if site.worker_of(waiting) == kept]
    others = [waiting for waiting in site.running if site.worker_of(waiting) != kept]
    site.end(on_kept[0])
    assert not site.is_running(site.ask(5)), "kept"
    site.end(others[0])
    assert site.worker_of(started(site)[-1]) != kept, "others go on elsewhere"
    site.end(on_kept[1])
    assert site.worker_of(large) == kept
    assert not site.admission.reserved_workers()


def test_tokens_that_passed_keep_a_worker_too() -> None:
    site = Site([10], max_passed_tokens=10 * BLOCK, max_passed_s=1e6)
    running = site.ask(5)
    large = site.ask(10)
    for _ in range(2):
        second = site.ask(5)
        assert site.is_running(second)
        site.end(running)
        running = second
    assert not site.is_running(site.ask(1)), "large has been passed by 10 blocks' tokens"
    site.end(running)
    assert site.is_running(large)


def test_the_worker_that_frees_first_is_kept() -> None:
    """Of 10 blocks each, all used: d1 frees the half at once, as one stream; more than half must go anywhere else."""
    site = Site([20, 20])
    site.ask(10), site.ask(10), site.ask(10), site.ask(10)
    assert {site.worker_of(waiting) for waiting in site.running} == {"d0", "d1"}
    large = site.ask(15)
    site.report("d1", 5)
    site.ask(1)
    site.wait(6)
    assert site.admission.reserved_workers() == {"d1": large}


@pytest.mark.parametrize("how", ["cancel", "worker leaves"])
def test_kept_workers_are_let_go(how: str) -> None:
    site = Site([10])
    running = site.ask(9)
    large = site.ask(10)
    site.ask(1)
    site.wait(6)
    assert site.admission.reserved_workers() == {"d0": large}
    if how == "cancel":
        waits = site.ask(1)
        site.end(running)
        site.cancel(large)
        assert site.is_running(waits)
    else:
        site.leave("d0")
    assert site.admission.reserved_workers() == {}


def test_a_class_above_goes_on_with_a_kept_worker_until_it_owes() -> None:
    """Interactive requests keep coming; the batch request has its turn once it is owed its share."""
    site = Site([100], lower_class_share=0.1, max_passed_s=1)
    running = [site.ask(25) for _ in range(4)]
    batch = site.ask(60, priority=-1)
    rounds = 0
    while not site.is_running(batch):
        site.ask(25)
        site.wait(0.5)
        if running:
            site.end(running.pop(0))
        running = list(site.running)
        rounds += 1
        assert rounds < 200
    assert rounds > 100, "a tenth of the tokens, from a quantum on"


def test_what_nobody_can_hold_blocks_nobody_and_is_refused() -> None:
    site = Site([10, 100], no_worker_grace_s=3, max_passed_s=1)
    site.ask(100)
    large = site.ask(50)
    site.leave("d1")
    assert site.is_running(site.ask(10)), "blocks nobody"
    site.ask(10)
    site.wait(2.9)
    assert large in site.waiting
    assert large not in site.admission.reserved_workers().values()
    site.wait(0.2)
    refusal = site.refused_for(large)
    assert isinstance(refusal.error, Unavailable)
    assert "50 KV blocks; the largest pool has 10" in refusal.error.message
    assert site.admission.num_refused == {"no worker": 1}


def test_one_that_comes_back_in_time() -> None:
    site = Site([])
    waits = site.ask(10)
    site.wait(9.9)
    site.join("d0", 10)
    assert site.is_running(waits)


def test_a_pool_too_small_for_the_whole_is_not_taken_for_a_start() -> None:
    """It promises little of a long output, but could never hold all of it and would refuse it for good."""
    site = Site([])
    hello = pb.Hello(worker_id="d0", role=pb.ROLE_DECODE, reserve_output_tokens=4)
    site.workers["d0"] = site.fleet.joined(hello)
    site.report("d0", 10)
    info = RequestInfo("", 0, 0.0)
    demand = Demand(4, 0, 11, BLOCK, 100, (4,), 44)
    assert demand.num_blocks_to_reserve(4) == 2
    _, outcomes = site.admission.arrived(info, demand, [], 0.0)
    assert outcomes == []


# ------------------------------------------------------------------------------------------------ batch


def test_batch_leaves_room_for_interactive() -> None:
    site = Site([100], batch_block_share=0.8)
    batch = [site.ask(20, priority=-1) for _ in range(5)]
    assert [site.is_running(waiting) for waiting in batch] == [True] * 4 + [False]
    assert site.is_running(site.ask(20))


def test_batch_larger_than_its_share_starts_on_an_empty_worker() -> None:
    site = Site([100], batch_block_share=0.8)
    small = site.ask(1)
    large = site.ask(90, priority=-1)
    assert not site.is_running(large)
    site.end(small)
    assert site.is_running(large)


# ---------------------------------------------------------------------------------------------- lenders


def bound(site: Site, waiting: QueuedRequest) -> bool:
    return site.is_running(waiting) and site.running[waiting].lender is not None


def test_nobody_is_bound_to_a_deep_lender() -> None:
    """2 s of an interactive request's limit, 0.5 s of a batch one's, at 1,000 tokens a second."""
    site = Site([1000], lenders=1)
    site.report("p0", 10_000, queued_tokens=600)
    batch = site.ask(100, priority=-1, usable=99)
    assert not site.is_running(batch)
    assert bound(site, site.ask(100, usable=99))
    site.report("p0", 10_000, queued_tokens=2001)
    held = site.ask(100, usable=99)
    assert not site.is_running(held)
    assert site.is_running(site.ask(1)), "who needs no lender goes on"
    site.report("p0", 10_000, queued_tokens=1900)
    assert bound(site, held)
    assert not site.is_running(batch)
    site.report("p0", 10_000, queued_tokens=400)
    assert bound(site, batch)


def test_who_is_held_back_is_looked_at_again_by_itself() -> None:
    """The deep lender leaves: computing it alone is what remains."""
    site = Site([1000], lenders=1)
    site.report("p0", 10_000, queued_tokens=2001)
    held = site.ask(100, usable=99)
    site.fleet.left(site.workers.pop("p0"))
    site.wait(0.3)
    assert site.is_running(held)


def test_decisions_that_hold_back_are_rationed() -> None:
    site = Site([100_000], lenders=1)
    site.report("p0", 10_000, queued_tokens=2001)
    calls = 0
    decide = site.fleet.decide

    def counting(*arguments):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        return decide(*arguments)

    site.fleet.decide = counting  # type: ignore[method-assign]
    for _ in range(500):
        site.ask(100, usable=99)
    for _ in range(100):
        site.wait(0.01)
        site.report("p0", 10_000, queued_tokens=2001)
    assert calls <= 32 + 200 * 1.01 + 1


def test_long_prompts_leave_lenders_to_short_ones() -> None:
    site = Site([100_000], lenders=2, long_prompt_s=4, max_lender_queue_s=100)
    long = [site.ask(2000, usable=1999) for _ in range(3)]
    assert [bound(site, waiting) for waiting in long] == [True, False, False], "one of two"
    short = site.ask(10, usable=9)
    assert site.running[short].lender.worker_id == "p1"
    site.fleet.started(site.running[long[0]])
    site.wait(1)
    assert [bound(site, waiting) for waiting in long] == [True, True, False]


@pytest.mark.parametrize(
    ("lenders", "share", "left", "long"),
    [
        *((1, 0.75, 3, 1), (2, 0.75, 3, 1), (4, 0.75, 3, 2), (5, 0.75, 3, 2), (8, 0.75, 3, 5), (16, 0.75, 3, 12)),
        *((8, 1.0, 0, 8), (8, 0.25, 0, 2), (8, 0.0, 0, 1)),
    ],
)
def test_so_many_lenders_may_compute_long_prompts(lenders: int, share: float, left: int, long: int) -> None:
    site = Site([1_000_000], lenders, long_prompt_lender_share=share, short_prompt_lenders=left, max_lender_queue_s=100)
    asked = [site.ask(2000, usable=1999) for _ in range(lenders + 1)]
    computing = {site.running[waiting].lender for waiting in asked if bound(site, waiting)}
    assert len(computing) == long
