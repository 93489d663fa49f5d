"""Placement over exact toy numbers: 4-token blocks, 1000 prefill tokens/s, 100 on a decode worker."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from router.placement.demand import Demand
from router.placement.place import Decision, place
from router.placement.rates import Rates
from router.placement.worker_table import Hits, WorkerTable, WorkerView
from support.toy_placement import RATES, worker

DEMAND = Demand(num_tokens=42, num_usable_blocks=10, num_total_blocks=12, block_tokens=4, block_bytes=1000)
NO_HITS: dict[str, int] = {}


def chosen(demand: Demand, views: Sequence[WorkerView], held: Mapping[str, int] = NO_HITS) -> Decision:
    workers = WorkerTable.of(views)
    decision = place(demand, workers, Hits.of(workers, held), Rates.uniform(len(views), RATES))
    assert decision is not None
    return decision


def test_borrowing_beats_a_slow_local_prefill() -> None:
    decision = chosen(DEMAND, [worker("d0"), worker("p0")])
    assert (decision.decode_id, decision.lender_id, decision.num_candidates) == ("d0", "p0", 2)
    # overhead 10 ms + 10 blocks of 1 ms transfer + 40 tokens at 1000/s + the 2-token tail at 100/s
    assert decision.predicted_ttft_s == pytest.approx(0.010 + 0.010 + 0.040 + 0.020)


@pytest.mark.parametrize(
    ("lender", "held", "reason"),
    [
        pytest.param({}, {"d0": 10, "p0": 10}, "nothing to borrow", id="decode holds all that may be borrowed"),
        pytest.param({"queued_prefill_tokens": 500}, {"d0": 9}, "cheaper than any loan", id="a short rest"),
        pytest.param({"fingerprint": b"other"}, {}, "", id="only equal fingerprints pair"),
        pytest.param({"num_blocks": 9}, {}, "", id="a lender too small for the prompt"),
    ],
)
def test_nothing_is_borrowed(lender: dict[str, object], held: dict[str, int], reason: str) -> None:
    decision = chosen(DEMAND, [worker("d0"), worker("p0", **lender)], held)
    assert decision.lender_id is None
    assert reason in decision.reason
    if held.get("d0") == 10:
        assert decision.predicted_ttft_s == pytest.approx(0.020)


def test_the_lender_that_holds_the_prefix_wins_until_its_queue_is_long() -> None:
    fleet = [worker("d0"), worker("p0"), worker("p1")]
    near = chosen(DEMAND, fleet, {"p1": 5})
    assert near.lender_id == "p1"
    fleet[2] = worker("p1", queued_prefill_tokens=1000)
    far = chosen(DEMAND, fleet, {"p1": 5})
    assert (far.lender_id, far.source_id) == ("p0", "p1")


def test_a_decode_worker_lends_what_it_decoded() -> None:
    fleet = [worker("d0", running=50), worker("d1")]
    decision = chosen(DEMAND, fleet, {"d0": 9})
    assert (decision.decode_id, decision.lender_id, decision.lender_computes) == ("d1", "d0", False)
    # overhead 10 ms + 9 blocks of 1 ms + 6 tokens at 100/s
    assert decision.predicted_ttft_s == pytest.approx(0.010 + 0.009 + 0.060)


def test_a_prefill_worker_reads_the_last_turn_from_the_worker_that_decoded_it() -> None:
    """A new turn too long to be computed beside streams: the lender reads the history and computes the turn."""
    demand = replace(DEMAND, num_tokens=802, num_usable_blocks=200, num_total_blocks=220)
    fleet = [worker("d0", available_blocks=300, num_blocks=300), worker("p0", num_blocks=300)]
    decision = chosen(demand, fleet, {"d0": 150})
    assert (decision.decode_id, decision.lender_id, decision.source_id) == ("d0", "p0", "d0")
    assert decision.lender_tokens == 200
    # overhead + 150 blocks to the lender, 200 tokens at 1000/s, overhead + 50 blocks back, the 2-token tail at 100/s
    assert decision.predicted_ttft_s == pytest.approx(0.160 + 0.200 + 0.060 + 0.020)
