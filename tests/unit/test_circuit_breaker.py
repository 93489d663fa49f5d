"""Circuit breaker: workers and lender pairs that fail get no requests for a while, then one probe."""

from protos import inference_pb2 as public_pb
from router.admission.request import QueuedRequest, RequestInfo
from router.admission.workers.circuit_breaker import FIRST_S, MOST_S
from router.placement.demand import Demand
from support.admission_site import BLOCK, Site


def fail(site: Site, waiting: QueuedRequest) -> None:
    site.running[waiting].failed = True
    site.end(waiting)


def test_a_worker_that_fails_is_tried_by_one_request_after_a_pause_that_doubles() -> None:
    site = Site([1000, 10])
    pause = FIRST_S
    for _ in range(12):
        tried = site.ask(4)
        assert site.worker_of(tried) == "d0"
        fail(site, tried)
        others = [site.ask(4), site.ask(4), site.ask(4)]
        assert [site.is_running(each) for each in others] == [True, True, False], "two have room elsewhere"
        assert {site.worker_of(each) for each in others[:2]} == {"d1"}
        site.wait(0.99 * pause)
        assert not site.is_running(others[2])
        site.wait(0.02 * pause)
        assert site.worker_of(others[2]) == "d0", "the time alone is enough"
        waits = site.ask(4)
        assert not site.is_running(waits), "one is enough to see whether it works"
        for each in (waits, *others):  # nothing was seen of the trial: another one may be
            site.cancel(each)
        pause = min(MOST_S, 2 * pause)


def test_a_trial_that_has_its_first_token_opens_the_worker() -> None:
    site = Site([1000])
    fail(site, site.ask(4))
    tried, waits = site.ask(4), site.ask(4)
    worker = site.fleet.worker("d0")
    site.wait(FIRST_S)
    assert (site.is_running(tried), site.is_running(waits)) == (True, False)
    assert worker.failing, "it is to be seen"
    site.fleet.started(site.running[tried])
    site.report("d0", 900)
    assert site.is_running(waits)
    assert not worker.failing
    fail(site, tried)
    retried = site.ask(4)
    site.wait(FIRST_S)
    assert site.is_running(retried), "it counts from the beginning"


def test_what_failed_together_is_one_failure() -> None:
    """And who was placed before and ends well says nothing of what is there now."""
    site = Site([1000])
    together = [site.ask(4) for _ in range(5)]
    site.wait(1)
    for each in together[:4]:
        fail(site, each)
    site.fleet.started(site.running[together[4]])
    site.end(together[4])
    waits = site.ask(4)
    assert not site.is_running(waits)
    site.wait(FIRST_S)
    assert site.is_running(waits)


def test_a_worker_that_joins_anew_is_another_one() -> None:
    site = Site([1000])
    fail(site, site.ask(4))
    waits = site.ask(4)
    site.leave("d0")
    site.join("d0", 1000)
    assert site.is_running(waits)


USABLE = 100


def lends(site: Site, failure: str = "", moved: int = 0, mismatched: int = 0) -> str | None:
    """A request of a long prompt that ends with such a receipt; who lent."""
    site.waiting.clear()
    demand = Demand(USABLE * BLOCK + 1, USABLE, USABLE + 1, BLOCK, 100)
    waiting = site.arrive(RequestInfo("", 0, site.now), demand, site.keys(USABLE))
    placed = site.running[waiting]
    kv = public_pb.KvReceipt(loan_failure=failure, moved_blocks=moved, mismatched_blocks=mismatched)
    receipt = public_pb.Receipt(kv=kv)
    site.fleet.started(placed)
    site.fleet.finished(placed, public_pb.Finish(receipt=receipt), 0.1)
    site.end(waiting)
    return placed.lender.worker_id if placed.lender else None


def test_a_lender_whose_blocks_come_wrong_is_kept_apart_and_not_for_what_another_tier_had() -> None:
    site = Site([10_000], lenders=2)
    assert [lends(site, moved=50, mismatched=1) for _ in range(4)] == ["p0"] * 4, "the decode worker's own disk"
    wrong = [lends(site, "block 50 arrived corrupted", moved=50, mismatched=1) for _ in range(3)]
    assert wrong == ["p0", "p0", "p1"]


def test_a_pair_whose_loans_fail_is_kept_apart() -> None:
    site = Site([10_000], lenders=2)
    assert lends(site, "no connection") == "p0"
    assert lends(site, moved=USABLE) == "p0"
    assert [lends(site, "no connection") for _ in range(3)] == ["p0", "p0", "p1"], "two of them in a row"
    borrower = site.fleet.worker("d0")
    assert borrower is not None
    assert site.fleet.failing_lenders(borrower) == ["p0"]
    site.join("p2", 10_000)
    assert lends(site, moved=USABLE) == "p1", "also when others come"
    site.wait(FIRST_S)
    assert lends(site, "again") == "p0"
    assert lends(site, moved=USABLE) == "p1"
    site.wait(2 * FIRST_S)
    assert [lends(site, moved=USABLE) for _ in range(2)] == ["p0", "p0"], "it works again"
    assert site.fleet.failing_lenders(borrower) == []
