"""Workers that a prompt is warmed on: the cheapest ones, and each request starts on its own worker only."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvcache.block_keys import block_keys, root_key
from protos import inference_pb2 as public_pb
from protos import membership_pb2 as pb
from router.admission.request import QueuedRequest, RequestInfo
from router.admission.workers.capacity import Capacity, could_hold
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.introductions import by_cost
from router.placement.place import place
from router.placement.rates import Priors
from router.placement.request_demand import demand_of

PRIORS = Priors(1000, 100, 1e6, 0.01, 0.002, 0.001)
PROMPT = list(range(40))
DEMAND = demand_of(PROMPT, public_pb.Sampling(), [PROMPT], False, 4, 1000, 100, only_fills=True)
KEYS = block_keys(root_key(b"model", ""), PROMPT, 4)


def fleet_of(loads: list[tuple[int, int, int]], with_store: int = 0) -> Fleet:
    """`loads`: available blocks, queued tokens and blocks of the prompt of each decode worker; a lender beside them."""
    fleet = Fleet("router", PRIORS)
    for number, (available, queued, held) in enumerate([*loads, (100, 0, 0)]):
        is_lender = number == len(loads)
        hello = pb.Hello(
            worker_id="p0" if is_lender else f"d{number}",
            role=pb.ROLE_PREFILL if is_lender else pb.ROLE_DECODE,
            model_fingerprint=b"model",
            num_blocks=100,
            store="folder:1" if number < with_store else "",
        )
        worker = fleet.joined(hello)
        report = pb.LoadReport(available_blocks=available, queued_prefill_tokens=queued, num_blocks=100)
        fleet.reported(worker, report)
        stored = pb.CacheEvent(stored=b"".join(KEYS[:held]))
        fleet.cache_changed(worker, pb.CacheEvents(events=[stored], snapshot=True))
    return fleet


LOADS = st.lists(
    st.tuples(st.sampled_from([0, 5, 100]), st.sampled_from([0, 50, 900]), st.integers(0, 10)), min_size=1, max_size=6
)


def test_a_request_without_output_needs_its_full_blocks_and_nothing_else() -> None:
    assert (DEMAND.num_usable_blocks, DEMAND.num_total_blocks, DEMAND.num_tokens) == (10, 10, 40)
    assert DEMAND.num_blocks_to_reserve(256) == 10


@given(LOADS, st.integers(0, 7))
def test_the_cheapest_are_chosen_however_full_they_are(loads: list[tuple[int, int, int]], count: int) -> None:
    fleet = fleet_of(loads)
    chosen, num_able = by_cost(fleet, DEMAND, KEYS, count)
    assert (len(set(chosen)), num_able) == (min(count, len(loads)), len(loads))
    costs = {}
    for number in range(len(loads)):
        one = replace(DEMAND, only=(f"d{number}",))
        decision = place(one, fleet.snapshot, fleet.hits(KEYS), fleet.rates, fleet.snapshot.num_blocks)
        assert (decision.decode_id,) == one.only
        costs[decision.decode_id] = decision.cost_s
    assert [costs[each] for each in chosen] == sorted(costs.values())[:count]


@given(LOADS, st.integers(0, 6))
def test_a_store_may_be_wanted(loads: list[tuple[int, int, int]], with_store: int) -> None:
    chosen, num_able = by_cost(fleet_of(loads, with_store), DEMAND, KEYS, 9, with_store=True)
    assert num_able == len(chosen) == min(with_store, len(loads))
    assert set(chosen) <= {f"d{number}" for number in range(with_store)}


@given(LOADS, st.integers(0, 7))
def test_it_waits_for_its_worker_alone(loads: list[tuple[int, int, int]], only: int) -> None:
    """It starts when this worker has room, whatever room others have; a worker that is gone can hold nothing."""
    fleet = fleet_of(loads)
    demand = replace(DEMAND, only=(f"d{only}",))
    waiting = QueuedRequest.of(RequestInfo("", -1, 0.0), demand, KEYS, 1, 0.0)
    waiting.measure(fleet.snapshot)
    large = fleet.snapshot.num_blocks + 1
    capacity = Capacity.of(fleet.snapshot, (), large, 1.0)
    is_there = only < len(loads)
    assert could_hold(demand, fleet.snapshot) is is_there
    assert waiting.need <= capacity.greatest
    fits = is_there and loads[only][0] >= 10
    assert capacity.fits(waiting) is fits
    decision = fleet.decide(demand, KEYS, capacity.available)
    assert (decision is not None) is fits
    if decision is not None:
        assert (decision.decode_id,) == demand.only
