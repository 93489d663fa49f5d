"""Placement over exact toy numbers: 4-token blocks, 1000 prefill tokens/s, 100 on a decode worker."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.demand import Demand
from router.placement.place import Decision
from router.placement.place import place as place_rows
from router.placement.rates import Priors, Rates
from router.placement.worker_table import Hits, WorkerTable, WorkerView
from support.toy_placement import RATES, worker

DEMAND = Demand(num_tokens=42, num_usable_blocks=10, num_total_blocks=12, block_tokens=4, block_bytes=1000)
NO_HITS: dict[str, int] = {}


def place(
    demand: Demand,
    views: Sequence[WorkerView],
    held: Mapping[str, int],
    rates: Priors,
    due: Mapping[str, int] | None = None,
) -> Decision | None:
    """The same rates for all; blocks by worker id."""
    workers = WorkerTable.of(views)
    return place_rows(demand, workers, Hits.of(workers, held, due), Rates.uniform(len(views), rates))


def chosen(
    demand: Demand,
    views: Sequence[WorkerView],
    held: Mapping[str, int] = NO_HITS,
    rates: Priors = RATES,
    due: Mapping[str, int] | None = None,
) -> Decision:
    decision = place(demand, views, held, rates, due)
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


def test_running_streams_pay_for_local_prefill() -> None:
    """Alone, computing 6 tokens here is cheaper than a loan that waits for 100 tokens; with 20 streams it is not."""
    demand = replace(DEMAND, num_tokens=6, num_usable_blocks=1, num_total_blocks=3)
    lender = worker("p0", queued_prefill_tokens=100)
    alone = chosen(demand, [worker("d0"), lender])
    busy = chosen(demand, [worker("d0", running=20, decoding=20), lender])
    assert (alone.lender_id, busy.lender_id) == (None, "p0")


def test_the_lender_that_holds_the_prefix_wins_until_its_queue_is_long() -> None:
    fleet = [worker("d0"), worker("p0"), worker("p1")]
    near = chosen(DEMAND, fleet, {"p1": 5})
    assert near.lender_id == "p1"
    fleet[2] = worker("p1", queued_prefill_tokens=1000)
    far = chosen(DEMAND, fleet, {"p1": 5})
    assert (far.lender_id, far.source_id) == ("p0", "p1")


def test_a_full_decode_worker_is_not_chosen() -> None:
    fleet = [worker("d0", available_blocks=11), worker("d1", running=50), worker("p0")]
    decision = chosen(DEMAND, fleet, {"d0": 10})
    assert decision.decode_id == "d1"
    assert place(DEMAND, [worker("d0", available_blocks=11), worker("p0")], NO_HITS, RATES) is None


views = st.lists(
    st.builds(
        WorkerView,
        worker_id=st.sampled_from([f"{role}{number}" for role in "dp" for number in range(4)]),
        decodes=st.booleans(),
        fingerprint=st.sampled_from([b"a", b"b"]),
        running=st.integers(0, 50),
        decoding=st.integers(0, 50),
        queued_prefill_tokens=st.integers(0, 5000),
        available_blocks=st.integers(0, 100),
        num_blocks=st.just(100),
    ),
    max_size=8,
    unique_by=lambda view: view.worker_id,
)


def test_what_a_lender_holds_is_read_without_waiting_for_its_queue() -> None:
    busy = worker("p0", queued_prefill_tokens=5000)
    decision = chosen(DEMAND, [worker("d0"), busy], {"p0": 10})
    assert (decision.lender_id, decision.lender_computes, decision.lender_tokens) == ("p0", False, 0)
    # overhead 10 ms + 10 blocks of 1 ms + the 2-token tail at 100/s
    assert decision.predicted_ttft_s == pytest.approx(0.010 + 0.010 + 0.020)


def test_blocks_that_are_still_being_computed_cannot_be_read_at_once() -> None:
    decision = chosen(DEMAND, [worker("d0"), worker("p0")], due={"p0": 10})
    assert (decision.lender_id, decision.lender_computes) == ("p0", True)


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


def test_a_source_is_named_only_where_reading_beats_computing() -> None:
    slow_link = replace(RATES, kv_bytes_per_s=1e5)
    decision = chosen(DEMAND, [worker("d0"), worker("p0"), worker("p1", num_blocks=9)], {"p1": 5}, slow_link)
    assert (decision.lender_id, decision.source_id, decision.lender_tokens) == ("p0", None, 40)


@given(views, st.dictionaries(st.sampled_from(["d0", "d1", "p0", "p1"]), st.integers(0, 12)))
def test_what_is_chosen_can_start_and_fits_together(workers: list[WorkerView], held: dict[str, int]) -> None:
    decision = place(DEMAND, workers, held, RATES)
    able = [view for view in workers if view.decodes and view.available_blocks >= DEMAND.num_total_blocks]
    assert (decision is None) == (not able)
    if decision is not None:
        by_id = {view.worker_id: view for view in workers}
        assert by_id[decision.decode_id] in able
        if decision.lender_id is not None:
            lender = by_id[decision.lender_id]
            assert lender is not by_id[decision.decode_id]
            assert lender.fingerprint == by_id[decision.decode_id].fingerprint
            assert not (lender.decodes and decision.lender_computes)
            assert held.get(decision.decode_id, 0) < DEMAND.num_usable_blocks
            if not decision.lender_computes:
                assert held[lender.worker_id] > held.get(decision.decode_id, 0)
        if decision.source_id is not None:
            assert decision.lender_computes
            assert decision.source_id != decision.lender_id
            assert by_id[decision.source_id].fingerprint == by_id[decision.decode_id].fingerprint
        assert decision == place(DEMAND, list(reversed(workers)), held, RATES)
