"""What is learnt of speed: it converges, stays finite, and no single measurement spoils it."""

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import inference_pb2 as pb
from router.placement.learning.rate_learning import LEAST_DELAY_SHARE, LogRatios, RateLearner, ReceiptTimings, measured
from router.placement.rates import LEAST, MAX_FACTOR, MOST, LinearFit, Priors

PRIORS = Priors(1000, 100, 1e6, 0.01, 0.002, 0.001)
IDS = ["d0", "d1", "p0", "p1"]
D0, D1, P0, P1 = range(4)

seconds = st.one_of(st.just(0.0), st.floats(1e-9, 1e9))
amounts = st.one_of(st.just(0.0), st.floats(1, 1e12))


@given(
    unit_s=st.floats(1e-5, 1e-3),
    fixed_units=st.floats(10, 3000),
    wrong_by=st.tuples(st.floats(0.05, 20), st.floats(0.05, 20)),
    noise=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 100),
)
def test_a_line_converges(
    unit_s: float, fixed_units: float, wrong_by: tuple[float, float], noise: float, seed: int
) -> None:
    """Where the fixed part is worth some units: one that never matters is never learnt."""
    seeds = random.Random(seed)
    line = LinearFit(fixed_units * unit_s * wrong_by[0], unit_s * wrong_by[1])

    def true_s(amount: float) -> float:
        return (fixed_units + amount) * unit_s

    for _ in range(1000):
        amount = math.exp(seeds.uniform(0, 10))
        line.observe(amount, true_s(amount) * math.exp(seeds.gauss(0, noise)))
    errors = [abs(math.log(line.seconds(amount) / true_s(amount))) for amount in (math.exp(x / 10) for x in range(100))]
    assert statistics.mean(errors) < (0.06 if noise == 0 else 0.2)


@given(st.lists(st.tuples(amounts, seconds), max_size=80), amounts, seconds)
def test_a_line_stays_finite_and_one_measurement_moves_it_by_little(
    history: list[tuple[float, float]], amount: float, took: float
) -> None:
    line = LinearFit(0.01, 1e-3)
    for measurement in history:
        line.observe(*measurement)
    before = line.fresh()
    line.observe(amount, took)
    for now, then in ((line.fixed_s, before.fixed_s), (line.unit_s, before.unit_s)):
        assert LEAST <= now <= MOST
        assert then / MAX_FACTOR * (1 - 1e-9) <= now <= then * MAX_FACTOR * (1 + 1e-9)
    assert MAX_FACTOR < 1.5


def test_a_stalled_transfer_is_forgotten() -> None:
    line = LinearFit(0.01, 1e-6)
    for _ in range(50):
        line.observe(10_000, 0.02)
    learnt = line.seconds(10_000)
    for _ in range(3):
        line.observe(10_000, 600.0)
    stalled = line.seconds(10_000)
    assert learnt * 1.05 < stalled < learnt * 2
    for _ in range(30):
        line.observe(10_000, 0.02)
    assert line.seconds(10_000) == pytest.approx(learnt, rel=0.1)


def learner() -> RateLearner:
    made = RateLearner(PRIORS)
    made.arrange(IDS)
    return made


def learn_transfer(made: RateLearner, borrower: str, lender: str, bytes_per_s: float, times: int = 200) -> None:
    seeds = random.Random(1)
    for _ in range(times):
        num_bytes = math.exp(seeds.uniform(5, 20))
        made.observe(ReceiptTimings(borrower, lender, transfer=(num_bytes, 0.01 + num_bytes / bytes_per_s)))


def test_before_anything_is_measured_the_priors_hold() -> None:
    rates = learner().rates
    assert rates.prefill_tokens_per_s == pytest.approx(np.full(4, 1000))
    assert rates.tail_fixed_s == pytest.approx(np.full(4, 0.002))
    assert rates.kv_bytes_per_s == pytest.approx(np.full((4, 4), 1e6))
    assert rates.loan_overhead_s == pytest.approx(np.full((4, 4), 0.01))


def test_a_pair_never_seen_is_taken_for_the_middle_of_its_ends() -> None:
    made = learner()
    learn_transfer(made, "d0", "p0", 1e8)
    rates = made.rates.kv_bytes_per_s
    assert rates[D0, P0] == pytest.approx(1e8, rel=0.05)
    assert rates[D0, P1] == pytest.approx(1e8, rel=0.05), "d0 is all that is known of them"
    assert rates[D1, P0] == pytest.approx(1e8, rel=0.05)
    assert rates[D1, P1] == pytest.approx(1e8, rel=0.05), "the mean of all"
    learn_transfer(made, "d1", "p1", 1e6)
    assert rates[D0, P0] == pytest.approx(1e8, rel=0.05)
    assert rates[D1, P1] == pytest.approx(1e6, rel=0.05)
    assert rates[D1, P0] == pytest.approx(1e7, rel=0.1), "p0 is fast to others, d1 slow"
    assert rates[D0, P1] == pytest.approx(1e7, rel=0.1)
    assert made.rates.loan_overhead_s == pytest.approx(np.full((4, 4), 0.01), rel=0.3)


def test_workers_never_seen_are_taken_for_the_mean_of_the_others() -> None:
    made = learner()
    for tokens in [10, 100, 1000, 5000] * 100:
        made.observe(
            ReceiptTimings("d0", "p0", prefill=(tokens, 0.002 + tokens / 5000), tail=(tokens, 0.002 + tokens / 300))
        )
    assert made.rates.prefill_tokens_per_s == pytest.approx(np.full(4, 5000), rel=0.05)
    assert made.rates.decode_prefill_tokens_per_s == pytest.approx(np.full(4, 300), rel=0.05)
    for tokens in [10, 100, 1000, 5000] * 100:
        made.observe(ReceiptTimings("d1", "p1", prefill=(tokens, 0.002 + tokens / 1000)))
    assert made.rates.prefill_tokens_per_s[[P0, P1]] == pytest.approx([5000, 1000], rel=0.05)


def test_steps_that_cost_the_same_still_spread_streams() -> None:
    made = learner()
    for running in list(range(1, 40)) * 30:
        made.observe(ReceiptTimings("d0", step=(running, 0.05)))
        made.observe(ReceiptTimings("d1", step=(running, 0.05 + running * 0.004)))
    assert made.rates.stream_delay_s[[D0, D1]] == pytest.approx(
        [PRIORS.stream_delay_s / LEAST_DELAY_SHARE, 0.004], rel=0.15
    )


def test_what_was_learnt_survives_others_coming_and_going_and_not_its_own_going() -> None:
    made = learner()
    learn_transfer(made, "d1", "p0", 1e8)
    for tokens in [10, 100, 1000, 5000] * 100:
        made.observe(ReceiptTimings("d1", "p0", prefill=(tokens, 0.002 + tokens / 5000)))
    before = float(made.rates.kv_bytes_per_s[D1, P0])
    made.arrange(["a0", "d1", "p0"])
    assert made.rates.kv_bytes_per_s[1, 2] == before
    assert made.rates.prefill_tokens_per_s[2] == pytest.approx(5000, rel=0.05)
    made.observe(
        ReceiptTimings("d0", "p1", transfer=(1e6, 1.0), prefill=(1, 1), tail=(1, 1), step=(1, 1))
    )  # both are gone
    made.arrange(["d1"])
    made.arrange(["d1", "p0"])
    assert made.rates.kv_bytes_per_s[0, 1] != before, "p0 may be another machine now"


workers = st.sampled_from([*IDS, "gone"])
pairs = st.one_of(st.none(), st.tuples(amounts, seconds))


@given(
    st.lists(
        st.one_of(
            st.builds(ReceiptTimings, workers, workers, pairs, pairs, pairs, pairs),
            st.lists(st.sampled_from(IDS), unique=True).map(sorted),
        ),
        max_size=30,
    )
)
def test_the_arrays_are_what_a_new_arrangement_would_give(events: list[ReceiptTimings | list[str]]) -> None:
    """What is updated in place equals what is computed from nothing; and all of it is above 0 and finite."""
    made, ids = learner(), list(IDS)
    for event in events:
        if isinstance(event, ReceiptTimings):
            made.observe(event)
        else:
            ids = event
            made.arrange(ids)
    updated = made.rates
    made.arrange(ids)
    for name in updated.__dataclass_fields__:
        array = getattr(updated, name)
        assert np.isfinite(array).all()
        assert (array > 0).all()
        np.testing.assert_allclose(array, getattr(made.rates, name), rtol=1e-9)


# ---------------------------------------------------------------------------- receipts


def finish(**kv: object) -> pb.Finish:
    spans = {"lender queue": 10, "lender prefill": 30, "transfer of the last blocks": 5, "decode queue": 2}
    spans |= {"prompt tail": 8, "decode": 900}
    stages = [pb.Stage(name=name, where="d0", duration_ms=length) for name, length in spans.items()]
    stages.append(pb.Stage(name="decode", where="router", duration_ms=77))
    figures: dict[str, object] = {"block_tokens": 4, "moved_blocks": 10, "moved_bytes": 1000, "computed_tokens": 3}
    receipt = pb.Receipt(
        placement=pb.Placement(decode_worker="d0", lender="p0", attempt=1),
        kv=pb.KvReceipt(**(figures | kv)),
        stages=stages,
    )
    return pb.Finish(usage=pb.Usage(completion_tokens=10), receipt=receipt)


def test_a_computing_loan_tells_of_the_lender() -> None:
    said = measured(finish(lender_computed_blocks=10), 20, 100, running=4.5, num_choices=1)
    assert said == ReceiptTimings("d0", "p0", (140, pytest.approx(0.04)), None, (23, pytest.approx(0.01)), (4.5, 0.1))


def test_a_loan_of_what_was_there_tells_of_the_link() -> None:
    said = measured(finish(lender_cached_blocks=10), 0, 100, running=1, num_choices=1)
    assert (said.prefill, said.transfer) == (None, (1000, pytest.approx(0.045)))


@pytest.mark.parametrize("disturbance", [{"loan_failure": "peer silent"}, {"mismatched_blocks": 1}, {"preemptions": 1}])
def test_what_was_disturbed_tells_nothing(disturbance: dict[str, object]) -> None:
    said = measured(finish(lender_computed_blocks=10, **disturbance), 0, 0, running=1, num_choices=1)
    assert said.prefill is said.transfer is said.tail is None


def test_what_was_several_things_at_once_tells_nothing_of_either() -> None:
    fetched = measured(finish(lender_computed_blocks=5, lender_fetched_blocks=5), 0, 0, running=1, num_choices=2)
    assert fetched.prefill is fetched.transfer is fetched.step is None
    again = finish()
    again.receipt.placement.attempt = 2
    assert measured(again, 0, 0, running=1, num_choices=1).step is None


def test_a_step_that_gave_several_tokens_is_one_step() -> None:
    drafted = finish()
    drafted.receipt.speculation.draft_tokens = 8
    drafted.receipt.speculation.accepted_tokens = 3
    assert measured(drafted, 0, 0, running=2, num_choices=1).step == (2, pytest.approx(0.9 / 6))


# ---------------------------------------------------------------------------- scores


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=200), st.floats(0, 1))
def test_quantiles_are_right_within_a_bin(doublings: list[float], share: float) -> None:
    scores = LogRatios()
    for doubling in doublings:
        scores.add(2**doubling, 1.0)
    (quantile,) = scores.quantiles([share])
    ordered = sorted(doublings)
    rank = max(1, math.ceil(share * len(ordered) - 1e-9))
    assert math.log2(quantile) == pytest.approx(ordered[rank - 1], abs=1 / 16 + 1e-6)


def test_scores_follow_the_present() -> None:
    scores = LogRatios()
    assert math.isnan(scores.quantiles([0.5])[0])
    for _ in range(5000):
        scores.add(8, 1)
    for _ in range(20_000):
        scores.add(1e9, 1e9)
    assert scores.quantiles([0.1, 0.9]) == [1.0, 1.0]
    assert scores.num_seen == 25_000
