"""Output lengths: a quantile by tenant and task, censored where max_tokens cut, and what is reserved by it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core_types import EngineSequence, SamplingParams
from kvcache.block_keys import root_key
from protos import inference_pb2 as public_pb
from protos import membership_pb2 as pb
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.learning.output_lengths import BINS_PER_DOUBLING, EVERY, MEMORY, SHARE, OutputLengths
from router.placement.place import Decision
from router.placement.rates import Priors
from sizing.cluster.cluster import ClusterSpec
from tests.support.virtual_cluster import PRIORS, Observed, worker_spec
from workloads.request import EndState, TraceRequest

KEY = ("tenant", "task")
STEP = 2 ** (1 / BINS_PER_DOUBLING)


def learned(outputs: list[tuple[int, bool]]) -> int | None:
    lengths = OutputLengths()
    for num_tokens, is_cut in outputs:
        lengths.observe(KEY, num_tokens, is_cut)
    estimate = lengths.estimate(KEY)
    return None if estimate is None else estimate.num_tokens


@given(st.lists(st.integers(1, 100_000), min_size=EVERY, max_size=MEMORY - 1))
def test_without_cuts_it_is_the_quantile_rounded_up_to_the_end_of_its_bin(seen: list[int]) -> None:
    del seen[len(seen) // EVERY * EVERY :]  # the last estimate is made of all
    exact = sorted(seen)[math.ceil(SHARE * len(seen) - 1e-9) - 1]
    found = learned([(num_tokens, False) for num_tokens in seen])
    assert found is not None
    assert exact <= found <= exact * STEP + 1


def test_a_key_without_enough_outputs_has_no_estimate_and_keys_are_apart() -> None:
    lengths = OutputLengths()
    for _ in range(EVERY - 1):
        lengths.observe(KEY, 20, is_cut=False)
    assert lengths.estimate(KEY) is None
    lengths.observe(KEY, 20, is_cut=False)
    assert lengths.estimate(KEY) is not None
    assert lengths.estimate(("tenant", "another")) is None


def test_a_cut_output_is_at_least_as_long() -> None:
    """Half are cut at 10; of those that were not, all have 100 tokens: as if all had."""
    found = learned([(10, True), (100, False)] * EVERY)
    assert found is not None
    assert 100 <= found <= 100 * STEP + 1
    cut = learned([(64, True)] * EVERY)
    assert cut == 64, "nothing longer is known"


def test_it_follows_a_change_and_forgets_keys_used_least_recently() -> None:
    lengths = OutputLengths(max_keys=2)
    for num_tokens in (20, 1000):
        for _ in range(2 * MEMORY):
            lengths.observe(KEY, num_tokens, is_cut=False)
    estimate = lengths.estimate(KEY)
    assert estimate.num_tokens >= 1000
    lengths.observe(("b", ""), 1, is_cut=False)
    lengths.observe(KEY, 1000, is_cut=False)
    lengths.observe(("c", ""), 1, is_cut=False)
    assert len(lengths) == 2
    assert lengths.estimate(KEY) is not None


def a_fleet() -> Fleet:
    fleet = Fleet("router", Priors(1000, 100, 1e6, 0.01, 0.001, 0.001))
    hello = pb.Hello(worker_id="d0", role=pb.ROLE_DECODE, model_fingerprint=b"m", reserve_output_tokens=256)
    worker = fleet.joined(hello)
    fleet.reported(worker, pb.LoadReport(available_blocks=1000, num_blocks=1000))
    return fleet


def finish_of(num_tokens: int) -> public_pb.Finish:
    usage = public_pb.Usage(prompt_tokens=16, completion_tokens=num_tokens)
    return public_pb.Finish(reason=public_pb.FINISH_REASON_STOP, usage=usage)


def demand_of(num_emitted: int = 0, max_tokens: int = 2048) -> Demand:
    num_tokens = 16 + num_emitted
    return Demand(num_tokens, 0, (16 + max_tokens) // 16, 16, 100, (num_tokens,), 16 + max_tokens)


def test_the_router_reserves_by_what_receipts_said_and_never_more_than_the_worker_allows() -> None:
    fleet = a_fleet()
    fresh = fleet.with_expected_output(demand_of(), KEY, 16)
    assert fresh.num_blocks_to_reserve(256) == (16 + 256) // 16
    assert "unknown" in fresh.reservation(256)
    for num_tokens, key in ((16, KEY), (1024, ("long", ""))):
        for _ in range(EVERY):
            demand = fleet.with_expected_output(demand_of(), key, 16)
            placed = fleet.placed(Decision("d0", None, False, None, 0, 16, 0, 0, 1, ""), demand, [])
            fleet.finished(placed, finish_of(num_tokens), None)
            fleet.ended(placed)
    short = fleet.with_expected_output(demand_of(), KEY, 16)
    assert (short.expected_output_tokens, short.num_blocks_to_reserve(256)) == (16, 2)
    assert short.reservation(256) == "80th percentile of 8 outputs of this tenant and task"
    assert fleet.with_expected_output(demand_of(10), KEY, 16).expected_output_tokens == 6, "10 are emitted"
    assert fleet.with_expected_output(demand_of(20), KEY, 16).num_blocks_to_reserve(256) == (36 + 256 + 15) // 16
    long = fleet.with_expected_output(demand_of(), ("long", ""), 16)
    assert long.reserved_output_tokens(256) == 256
    assert long.reservation(256).endswith("outputs of this tenant and task: 1024")
    assert fleet.with_expected_output(demand_of(max_tokens=50), ("long", ""), 16).expected_output_tokens == 50


@pytest.mark.parametrize(("num_sampled", "reserved"), [(0, 120), (15, 120), (20, 170), (990, 1100)])
def test_an_engine_reserves_to_the_expected_end_and_by_its_setting_beyond(num_sampled: int, reserved: int) -> None:
    sampling = SamplingParams(max_tokens=1000, seed=1)
    sequence = EngineSequence("r", [1] * 100, 100, root_key(b"m", ""), 0, 1, sampling=sampling, num_expected=120)
    sequence.token_ids += [2] * num_sampled
    assert sequence.num_tokens_reserved(50) == reserved
    assert sequence.num_tokens_reserved(5) <= sequence.num_tokens + 5


def test_a_cluster_with_outputs_of_two_lengths_learns_both_and_router_and_engine_agree() -> None:
    """Pools are small: where the router promised less than the engine wants, the engine would refuse."""
    requests = [
        TraceRequest(number, 0.05 * number, 100 + number % 50, 600 if number % 8 == 0 else 20, (), 64, tenant)
        for number in range(400)
        for tenant in ["long" if number % 8 == 0 else "short"]
    ]
    workers = (("prefill-0", worker_spec("prefill", 400)), ("decode-0", worker_spec("decode", 300)))
    run = Observed(ClusterSpec(workers, PRIORS), requests)
    assert not run.faults
    assert all(each.end_state is EndState.FINISHED for each in run.outcomes)
    assert all(each.num_attempts == 1 for each in run.outcomes)
    fleet = run.cluster.routers[0].fleet
    demand = Demand(16, 0, 100, 16, 100, (16,), 16 + 2048)
    assert fleet.with_expected_output(demand, ("short", ""), 16).expected_output_tokens in range(20, 24)
    assert fleet.with_expected_output(demand, ("long", ""), 16).expected_output_tokens in range(600, 720)
