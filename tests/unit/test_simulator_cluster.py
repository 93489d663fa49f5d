"""Clusters in virtual time: every request ends once, nothing is left behind, and the same seed gives the same."""

import os
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sizing.comparison.policies import AlwaysLend, LeastLoaded, PrefixHash, RoundRobin
from support.virtual_cluster import Observed, cluster_spec, kills, random_requests
from workloads.request import EndState, TraceRequest

TRIALS = int(os.environ.get("TANDEM_TRIALS", "15"))
POLICIES = [None, RoundRobin, LeastLoaded, PrefixHash, AlwaysLend]


@settings(max_examples=TRIALS, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shape=st.sampled_from([(0, 2), (1, 2), (2, 1), (3, 3)]),
    policy=st.sampled_from(POLICIES),
    routers=st.sampled_from([1, 3]),
    deaths=st.lists(st.tuples(st.floats(0.05, 2.0), st.integers(0, 5)), max_size=3),
)
def test_every_request_ends_once_and_nothing_is_left(
    seed: int, shape: tuple[int, int], policy: type | None, routers: int, deaths: list[tuple[float, int]]
) -> None:
    """Whoever routes, and whoever dies in the middle of whatever."""
    spec = cluster_spec(*shape)
    names = {spec.workers[number % len(spec.workers)][0]: at_s for at_s, number in deaths}
    spec = replace(spec, num_routers=routers, failures=kills([(at_s, name) for name, at_s in names.items()]))
    if policy is not None:
        spec = replace(spec, make_fleet=policy)
    requests = random_requests(seed, 25, rate=12.0)
    observed = Observed(spec, requests)
    ended = Counter(outcome.request.number for outcome in observed.outcomes)
    assert ended == dict.fromkeys(range(25), 1)
    assert observed.faults == []
    decoders_live = any(name.startswith("decode") and name not in names for name, _ in spec.workers)
    for outcome in observed.outcomes:
        if decoders_live:
            assert outcome.end_state is EndState.FINISHED, outcome.reason
        if outcome.end_state is EndState.FINISHED:
            assert outcome.num_emitted == outcome.request.output_tokens
            assert outcome.sent_at < outcome.first_token_at <= outcome.last_token_at
            assert 0 <= outcome.reused_tokens <= outcome.request.input_tokens
    finished = sum(o.num_emitted - 1 for o in observed.outcomes if o.num_emitted)
    assert observed.cluster.fronts.gaps.count == finished


def test_the_same_run_gives_the_same_to_the_bit() -> None:
    spec = replace(cluster_spec(2, 2), num_routers=2, failures=kills([(1.0, "decode-0")]))
    first, second = (Observed(spec, random_requests(7, 40, rate=10.0)) for _ in range(2))
    assert first.summary == second.summary
    assert first.reports == second.reports
    other = Observed(replace(spec, seed=1), random_requests(7, 40, rate=10.0))
    assert other.summary != first.summary


def test_a_request_alone_takes_what_the_model_says() -> None:
    """Nothing is queued: TTFT is messages, steps and the transfer, in exact figures."""
    spec = cluster_spec(1, 1)
    (_, prefill), (_, decode) = spec.workers
    observed = Observed(spec, [TraceRequest(0, 0.0, 16 * 32 + 1, 3)])
    (outcome,) = observed.outcomes
    assert outcome.num_attempts == 1
    timing, message_s = decode.timing, spec.message_s
    step_s = timing.step_s  # type: ignore[attr-defined]
    token_s = timing.prompt_token_s  # type: ignore[attr-defined]
    itl_s = step_s + timing.stream_s + timing.kv_token_s * (16 * 32 + 2.5)  # type: ignore[attr-defined]
    assert abs(outcome.itl_s - itl_s) < 1e-9
    if outcome.moved_bytes:
        assert outcome.moved_bytes == 32 * prefill.layout.block_bytes
        least_s = 5 * message_s + 2 * step_s + 512 * token_s + step_s + token_s
    else:
        least_s = 3 * message_s + 9 * step_s + 513 * token_s
    assert least_s < outcome.ttft_s < least_s + 0.05


def test_prompts_that_share_a_prefix_hit() -> None:
    hash_ids = tuple(range(10))
    requests = [TraceRequest(number, 2.0 * number, 640, 4, hash_ids, 64) for number in range(3)]
    observed = Observed(cluster_spec(0, 1), requests)
    reused = [outcome.reused_tokens for outcome in sorted(observed.outcomes, key=lambda o: o.request.number)]
    assert reused == [0, 624, 624]  # all but the block of the last token


def test_what_fits_no_pool_is_refused_and_the_rest_goes_on() -> None:
    requests = [TraceRequest(0, 0.0, 100_000, 1), TraceRequest(1, 0.1, 100, 5)]
    observed = Observed(cluster_spec(1, 1), requests)
    assert {o.request.number: o.end_state for o in observed.outcomes} == {0: EndState.REFUSED, 1: EndState.FINISHED}


def test_a_lender_that_dies_in_mid_transfer_costs_time_only() -> None:
    """Its prompt is on the way for a tenth of a second; at each of many moments of it the lender is gone."""
    seen = set()
    for tenth in range(1, 12):
        spec = replace(cluster_spec(1, 1), failures=kills([(0.01 * tenth, "prefill-0")]), make_fleet=AlwaysLend)
        observed = Observed(spec, [TraceRequest(0, 0.0, 1600, 8)])
        (outcome,) = observed.outcomes
        assert outcome.end_state is EndState.FINISHED
        assert outcome.num_emitted == 8
        assert observed.faults == []
        seen.add(outcome.moved_bytes // cluster_spec(1, 1).workers[0][1].layout.block_bytes)
    assert len(seen) > 2, "it always died at the same point of the loan"
    assert max(seen) <= 99


def test_a_golden_run() -> None:
    """One worker, so that placement has no say. If this fails, the engine schedules otherwise than it did, or the
    simulator times it otherwise: look at the difference before you change the figures."""
    observed = Observed(cluster_spec(0, 1), random_requests(3, 12, rate=8.0))
    rows = [
        (o.request.number, o.num_emitted, o.reused_tokens, round(o.ttft_s, 6), round(o.e2e_s, 6))
        for o in sorted(observed.outcomes, key=lambda outcome: outcome.request.number)
    ]
    assert rows == GOLDEN


GOLDEN: list[tuple[int, int, int, float, float]] = [
    (0, 51, 0, 0.065197, 0.435339),
    (1, 37, 0, 0.188714, 0.458381),
    (2, 33, 256, 0.044818, 0.284857),
    (3, 16, 528, 0.147991, 0.260877),
    (4, 42, 0, 0.259681, 0.43099),
    (5, 22, 208, 0.109987, 0.198193),
    (6, 52, 448, 0.007393, 0.21788),
    (7, 22, 336, 0.006554, 0.09156),
    (8, 18, 432, 0.006757, 0.07644),
    (9, 34, 240, 0.007713, 0.141617),
    (10, 56, 0, 0.081502, 0.312265),
    (11, 52, 1568, 0.046191, 0.259251),
]
