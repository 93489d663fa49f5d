"""Placement by matrices against the same cost model written anew here, one candidate at a time."""

import functools
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import Generator, default_rng

from router.placement import costs
from router.placement.costs import FEW
from router.placement.demand import Demand, traffic_hash_of
from router.placement.in_flight import IDLE, Flows
from router.placement.place import Decision, explain, place
from router.placement.rates import MOST_S, PART, SHARE, Floats, Priors, Rates
from router.placement.worker_table import Hits, WorkerTable, WorkerView

PRIORS = Priors(1000, 100, 1e6, 0.01, 0.002, 0.001)
SHARES = {"a": 0.0, "b": 0.1, "c": 0.0}
"""Of the traffic: one canary among others."""


FLOWS = [IDLE, IDLE, Flows(1_000, 1), Flows(90_000, 3), Flows(10_000_000, 2)]
"""Transfers in flight: a few small ones, and some of which a part at most is in the way."""


@dataclass(frozen=True)
class Case:
    demand: Demand
    views: list[WorkerView]
    held: dict[str, int]
    due: dict[str, int]
    last_decode: int = -1
    last_lender: int = -1

    @property
    def workers(self) -> WorkerTable:
        return WorkerTable.of(self.views)

    @property
    def hits(self) -> Hits:
        found = Hits.of(self.workers, self.held, self.due)
        return replace(found, last_decode=self.last_decode, last_lender=self.last_lender)


class Way(NamedTuple):
    """A way to start a request by the plain model, in the order of choice."""

    cost_s: float
    decode_id: str
    lender_id: str
    computes: bool
    source_id: str | None
    ttft_s: float
    seconds: Mapping[str, float]


def lends(lender: WorkerView, borrower: WorkerView) -> bool:
    """They have one model, and speak one version of loans; a store has none, and all read it."""
    versions = {lender.loan_version, borrower.loan_version}
    return lender.fingerprint == borrower.fingerprint and (None in versions or len(versions) == 1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small numbers, so that ties are common."""
    canaries = draw(st.booleans())
    names = draw(st.lists(st.sampled_from([f"w{number}" for number in range(9)]), max_size=9, unique=True))
    views = [
        WorkerView(
            worker_id=name,
            decodes=draw(st.booleans()),
            fingerprint=draw(st.sampled_from([b"a", b"a", b"a", b"b"])),
            running=draw(st.sampled_from([0, 0, 1, 40])),
            decoding=draw(st.sampled_from([0, 0, 1, 30])),
            queued_prefill_tokens=draw(st.sampled_from([0, 0, 16, 3000])),
            available_blocks=draw(st.sampled_from([5, 20, 100])),
            num_blocks=draw(st.sampled_from([8, 100])),
            reserve_output_tokens=draw(st.sampled_from([0, 8])),
            draining=draw(st.sampled_from([False, False, False, True])),
            traffic_share=draw(st.sampled_from([0.0, 0.0, 0.2, 0.5])) if canaries else 0.0,
            adapters=draw(st.sampled_from([frozenset(), frozenset({"aa"}), frozenset({"aa", "bb"})])),
            reads_media=draw(st.sampled_from([True, True, False])),
            loan_version=draw(st.sampled_from([1, 1, 1, 0, None])),
            outgoing=draw(st.sampled_from(FLOWS)),
            incoming=draw(st.sampled_from(FLOWS)),
        )
        for name in names
    ]
    usable = draw(st.sampled_from([0, 1, 10]))
    tokens = 4 * usable + draw(st.integers(1, 4))
    block_bytes, traffic_hash = draw(st.sampled_from([100, 1000, 100_000])), draw(st.sampled_from([0.1, 0.3, 0.7, 1.0]))
    demand = Demand(tokens, usable, usable + 9, 4, block_bytes, (tokens,), tokens + 30, traffic_hash=traffic_hash)
    demand = replace(demand, adapter=draw(st.sampled_from(["", "", "aa", "bb", "cc"])))
    items = draw(st.sampled_from([(), (), ((0, 3),), ((1, 9), (30, 42)), ((2, 20), (20, 44))]))
    demand = replace(demand, own_items=items, has_items=bool(items) or draw(st.sampled_from([False, False, True])))
    held = {name: draw(st.integers(0, usable)) for name in names if draw(st.booleans())}
    due = {name: max(held.get(name, 0), draw(st.integers(0, usable))) for name in names if draw(st.booleans())}
    last = [draw(st.integers(-1, len(names) - 1)) for _ in range(2)]
    return Case(demand, views, held, held | due, *last)


def random_rates(num_workers: int, seeds: Generator) -> Rates:
    """Each rate one of three, so that ties remain."""

    def some(*shape: int) -> Floats:
        return seeds.choice(np.array([0.5, 1.0, 20.0]), shape)

    return Rates(
        prefill_tokens_per_s=1000 * some(num_workers),
        prefill_fixed_s=0.002 * some(num_workers),
        decode_prefill_tokens_per_s=100 * some(num_workers),
        tail_fixed_s=0.002 * some(num_workers),
        stream_delay_s=0.001 * some(num_workers),
        kv_bytes_per_s=1e6 * some(num_workers, num_workers),
        loan_overhead_s=0.01 * some(num_workers, num_workers),
    )


def with_bound(case: Case, rates: Rates, sample: int) -> Decision | None:
    """Decide as in a fleet of so many pairs that most are excluded by the bound."""
    with patch.multiple(costs, MANY_PAIRS=0, SAMPLE=sample):
        return place(case.demand, case.workers, case.hits, rates)


def rival_costs(decision: Decision | None) -> list[float]:
    return [] if decision is None else [rival.cost_s for rival in decision.alternatives]


@given(cases(), st.integers(0, 1000), st.integers(1, 3))
def test_the_bound_excludes_only_pairs_that_do_not_matter(case: Case, seed: int, sample: int) -> None:
    rates = random_rates(len(case.views), default_rng(seed))
    whole = place(case.demand, case.workers, case.hits, rates)
    bounded = with_bound(case, rates, sample)
    assert bounded == whole
    assert rival_costs(bounded) == rival_costs(whole)


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_in_a_fleet_of_sixty(seed: int) -> None:
    seeds = default_rng(seed)
    views = [
        WorkerView(
            worker_id=f"w{number:02}",
            decodes=bool(seeds.integers(2)),
            fingerprint=b"a",
            running=int(seeds.integers(20)),
            decoding=int(seeds.integers(10)),
            queued_prefill_tokens=int(seeds.choice([0, 0, 100, 3000])),
            available_blocks=100,
            num_blocks=100,
        )
        for number in range(60)
    ]
    demand = Demand(42, 10, 12, 4, int(seeds.choice([100, 100_000])))
    held = {view.worker_id: int(seeds.integers(11)) for view in views if seeds.random() < 0.4}
    case = Case(demand, views, held, held, int(seeds.integers(-1, 60)), int(seeds.integers(-1, 60)))
    rates = Rates.uniform(60, PRIORS) if seed % 2 else random_rates(60, seeds)
    whole = place(case.demand, case.workers, case.hits, rates)
    assert whole is not None
    bounded = with_bound(case, rates, 8)
    assert bounded == whole
    assert rival_costs(bounded) == rival_costs(whole)


@given(cases(), st.integers(0, 1000))
def test_terms_add_up(case: Case, seed: int) -> None:
    rates = random_rates(len(case.views), default_rng(seed))
    for candidate in explain(case.demand, case.workers, case.hits, rates):
        terms = candidate.seconds
        assert all(term >= 0 for term in terms.values())
        assert candidate.cost_s == pytest.approx(sum(terms.values()) - candidate.affinity_s)
        assert candidate.delay_s == terms["prompt_delay"] + terms["stream_delay"]
        assert 0 <= candidate.affinity_s <= 0.05 * sum(terms.values()) + 1e-12
        assert candidate.own_tokens >= 1, "the last prompt token is computed where it is decoded"
        assert ("transfer" in terms) == (candidate.lender_id is not None)
        assert ("lender_compute" in terms) == candidate.lender_computes
        if candidate.source_id is None:
            assert not terms.get("source_read")


# ---------------------------------------------------------------------------- written anew


def theirs(traffic_hash: float, able: list[WorkerView], could: list[WorkerView]) -> list[WorkerView]:
    """Whom a request of this lot is for."""
    canaries = [view for view in able if view.traffic_share]
    others = [view for view in able if not view.traffic_share]
    if any(traffic_hash < view.traffic_share for view in could):
        return canaries or others
    return others if any(not view.traffic_share for view in could) else canaries


def encoding_s(items: Sequence[tuple[int, int]], covered: int, tokens_per_s: float) -> float:
    return 0.5 * sum(end - first for first, end in items if end > covered) / tokens_per_s


def plain_ways(case: Case, rates: Rates) -> Iterator[Way]:
    """Every way to start the request now."""
    demand, usable = case.demand, case.demand.num_usable_blocks
    row_of = {view.worker_id: row for row, view in enumerate(sorted(case.views, key=lambda view: view.worker_id))}

    def held(view: WorkerView) -> int:
        return case.held.get(view.worker_id, 0)

    def moved_s(borrower: WorkerView, lender: WorkerView, num_blocks: int, ready_s: float = 0.0) -> float:
        pair = row_of[borrower.worker_id], row_of[lender.worker_id]
        num_bytes, bytes_per_s = num_blocks * demand.block_bytes, float(rates.kv_bytes_per_s[pair])
        ends = (borrower.incoming, lender.outgoing)
        waiting = max(min(end.num_bytes, end.count * num_bytes) for end in ends)
        left = max(0.0, waiting - ready_s * bytes_per_s)
        return float(rates.loan_overhead_s[pair]) + (num_bytes + left) / bytes_per_s

    def way(decode: WorkerView, num_blocks: int, loan: dict[str, float], lender: str, source: str | None) -> Way:
        row, computes = row_of[decode.worker_id], "lender_compute" in loan
        tokens_per_s = float(rates.decode_prefill_tokens_per_s[row])
        own_s = (demand.num_tokens - num_blocks * demand.block_tokens) / tokens_per_s
        encoded = encoding_s(demand.own_items, num_blocks * demand.block_tokens, tokens_per_s)
        own = {
            "decode_queue": decode.queued_prefill_tokens / tokens_per_s,
            **({"encode": encoded} if demand.own_items else {}),
            "prompt_tail": float(rates.tail_fixed_s[row]) + own_s,
        }
        delay = {
            "prompt_delay": decode.decoding * own_s,
            "stream_delay": decode.running * float(rates.stream_delay_s[row]),
        }
        ttft_s = functools.reduce(operator.add, [*loan.values(), *own.values()])
        full_s = ttft_s + (delay["prompt_delay"] + delay["stream_delay"])
        matches = (row == case.last_decode) + (computes and row_of[lender] == case.last_lender)
        cost_s = full_s - matches * (min(full_s * SHARE, MOST_S) * PART)
        return Way(cost_s, decode.worker_id, lender, computes, source, ttft_s, loan | own | delay)

    could = [view for view in case.views if view.decodes and not view.draining]
    could = [view for view in could if view.num_blocks >= demand.num_total_blocks]
    could = [view for view in could if not demand.adapter or demand.adapter in view.adapters]
    could = [view for view in could if not demand.has_items or view.reads_media]
    able = [view for view in could if view.available_blocks >= demand.num_blocks_to_reserve(view.reserve_output_tokens)]
    computing = [view for view in case.views if not view.decodes and not view.draining and view.num_blocks >= usable]
    computing = [view for view in computing if not demand.adapter or demand.adapter in view.adapters]
    computing = [view for view in computing if not demand.has_items or view.reads_media]
    computing = theirs(demand.traffic_hash, computing, computing)
    for decode in theirs(demand.traffic_hash, able, could):
        yield way(decode, held(decode), {}, "", None)
        alike = [view for view in case.views if view is not decode and lends(view, decode)]
        for lender in alike if held(decode) < usable else []:
            if held(lender) > held(decode):
                loan = {"transfer": moved_s(decode, lender, held(lender) - held(decode))}
                yield way(decode, held(lender), loan, lender.worker_id, None)
            if lender not in computing:
                continue
            row = row_of[lender.worker_id]
            tokens_per_s = float(rates.prefill_tokens_per_s[row])
            due = case.due.get(lender.worker_id, 0)
            have, read_s, source = due, 0.0, None
            best_s = 0.0
            others = [view for view in alike if view is not lender] + [decode]
            for other in sorted(others, key=lambda view: view.worker_id):
                if (gain := held(other) - due) > 0:
                    taken_s = moved_s(lender, other, gain)
                    lost_s = taken_s - gain * demand.block_tokens / tokens_per_s
                    if lost_s < best_s:
                        best_s, read_s, source, have = lost_s, taken_s, other.worker_id, held(other)
            loan = {
                "source_read": read_s,
                "lender_queue": lender.queued_prefill_tokens / tokens_per_s,
                "lender_compute": float(rates.prefill_fixed_s[row])
                + (usable - have) * demand.block_tokens / tokens_per_s,
            }
            if demand.own_items:
                begun = [item for item in demand.own_items if item[0] < usable * demand.block_tokens]
                loan["lender_encode"] = encoding_s(begun, have * demand.block_tokens, tokens_per_s)
            ready_s = functools.reduce(operator.add, loan.values())
            loan["transfer"] = moved_s(decode, lender, usable - held(decode), ready_s)
            yield way(decode, usable, loan, lender.worker_id, source)


def check_decision(case: Case, rates: Rates) -> list[Way]:
    """Check the decision against all ways, to the last bit: so ties are the same, too."""
    decision = place(case.demand, case.workers, case.hits, rates)
    plain = sorted(plain_ways(case, rates), key=lambda way: way[:4])
    if decision is None:
        assert not plain
        return plain
    best = plain[0]
    assert decision.num_candidates == len(plain)
    chosen = decision.decode_id, decision.lender_id or "", decision.lender_computes, decision.source_id
    assert chosen == best[1:5]
    assert (decision.cost_s, decision.predicted_ttft_s) == (best.cost_s, best.ttft_s)
    assert [other.cost_s for other in decision.alternatives] == [way.cost_s for way in plain[1 : 1 + FEW]]
    ways = {way[:4] for way in plain[1:]}
    for other in decision.alternatives:
        assert (other.cost_s, other.decode_id, other.lender_id or "", other.lender_computes) in ways
    return plain


@given(cases(), st.integers(0, 1000))
def test_the_decision_and_every_term_are_the_plain_models(case: Case, seed: int) -> None:
    rates = random_rates(len(case.views), default_rng(seed))
    plain = check_decision(case, rates)
    listed = explain(case.demand, case.workers, case.hits, rates)
    assert [
        Way(each.cost_s, each.decode_id, each.lender_id or "", each.lender_computes, each.source_id, each.ttft_s, {})
        for each in listed
    ] == [way._replace(seconds={}) for way in plain]
    assert [each.seconds for each in listed] == [way.seconds for way in plain]


def random_fleet(size: int, seeds: Generator) -> Case:
    """A fleet of `size` with flows, hits, canaries and adapters, each in a part of the cases."""
    with_flows, with_canaries, with_adapters = (bool(seeds.integers(2)) for _ in range(3))
    share_prefill, usable = float(seeds.choice([0.2, 0.5])), int(seeds.choice([0, 16, 512]))
    views = [
        WorkerView(
            worker_id=f"w{number:03}",
            decodes=number == 0 or seeds.random() > share_prefill,
            fingerprint=b"b" if seeds.random() < 0.05 else b"a",
            running=int(seeds.integers(60)),
            decoding=int(seeds.integers(40)),
            queued_prefill_tokens=int(seeds.choice([0, 100, 3000])),
            available_blocks=int(seeds.choice([20, 1000])),
            num_blocks=int(seeds.choice([600, 2000])),
            reserve_output_tokens=int(seeds.choice([0, 64])),
            draining=seeds.random() < 0.05,
            traffic_share=float(seeds.choice([0.0, 0.0, 0.3])) if with_canaries else 0.0,
            adapters=frozenset({"aa"}) if with_adapters and seeds.random() < 0.7 else frozenset(),
            reads_media=True,
            outgoing=FLOWS[seeds.integers(5)] if with_flows else IDLE,
            incoming=FLOWS[seeds.integers(5)] if with_flows else IDLE,
        )
        for number in range(size)
    ]
    tokens = 4 * usable + 3
    demand = Demand(tokens, usable, usable + 9, 4, int(seeds.choice([100, 1000])), (tokens,), tokens + 30)
    if seeds.integers(2):
        demand = replace(demand, has_items=True, own_items=((1, tokens // 2), (tokens // 2, tokens - 1)))
    demand = replace(demand, traffic_hash=float(seeds.choice([0.1, 1.0])), adapter="aa" if with_adapters else "")
    share = float(seeds.choice([0.0, 0.2, 1.0]))
    held = {view.worker_id: int(seeds.integers(usable + 1)) for view in views if seeds.random() < share}
    due = {view.worker_id: usable for view in views if seeds.random() < 0.1}
    return Case(demand, views, held, held | due, *(int(seeds.integers(-1, size)) for _ in range(2)))


@pytest.mark.parametrize(("size", "count"), [(1, 10), (2, 20), (8, 20), (40, 10), (100, 4), (200, 4)])
def test_decisions_in_fleets_of_all_sizes_are_the_plain_models(size: int, count: int) -> None:
    for seed in range(count):
        seeds = default_rng([size, seed])
        case = random_fleet(size, seeds)
        check_decision(case, random_rates(size, seeds) if seed % 2 else Rates.uniform(size, PRIORS))


@pytest.mark.parametrize(
    ("names", "pool", "demand", "slow", "held", "chosen"),
    [
        pytest.param(
            ("d", "p0", "p1"), 100, Demand(42, 10, 12, 4, 1000), (0, 1, 1e5), {"p0": 10, "p1": 10},
            ("p1", False, None), id="the faster link is used",
        ),
        pytest.param(
            ("d0", "d1", "d2", "p0"), 300, Demand(802, 200, 220, 4, 1000), (3, 1, 1e3), {"d1": 150, "d2": 140},
            ("p0", True, "d2"), id="a stalled source is passed over for one that holds less",
        ),
    ],
)  # fmt: skip
def test_a_slow_link_is_not_used(
    names: tuple[str, ...],
    pool: int,
    demand: Demand,
    slow: tuple[int, int, float],
    held: dict[str, int],
    chosen: tuple[str, bool, str | None],
) -> None:
    views = [WorkerView(name, name.startswith("d"), b"m", 0, 0, 0, pool, pool) for name in names]
    workers, rates = WorkerTable.of(views), Rates.uniform(len(names), PRIORS)
    rates.kv_bytes_per_s[slow[:2]] = slow[2]
    decision = place(demand, workers, Hits.of(workers, held), rates)
    assert (decision.lender_id, decision.lender_computes, decision.source_id) == chosen


def test_nobody_is_there() -> None:
    workers = WorkerTable.of([])
    hits = Hits.of(workers, {})
    assert place(Demand(5, 1, 2, 4, 100), workers, hits, Rates.uniform(0, PRIORS)) is None
    assert explain(Demand(5, 1, 2, 4, 100), workers, hits, Rates.uniform(0, PRIORS)) == []


def test_a_canary_gets_its_share_and_no_request_waits_for_it() -> None:
    ids = [f"request {number}" for number in range(2000)]
    lots = {request_id: traffic_hash_of(request_id) for request_id in ids}
    assert all(0 <= traffic_hash < 1 for traffic_hash in lots.values())
    views = [WorkerView(name, True, b"m", 0, 0, 0, 100, 100, traffic_share=share) for name, share in SHARES.items()]

    def placed(views: list[WorkerView]) -> Counter[str]:
        workers, counts = WorkerTable.of(views), Counter[str]()
        for traffic_hash in lots.values():
            decision = place(
                Demand(5, 0, 2, 4, 100, traffic_hash=traffic_hash),
                workers,
                Hits.of(workers, {}),
                Rates.uniform(3, PRIORS),
            )
            counts["none" if decision is None else "canary" if SHARES[decision.decode_id] else "others"] += 1
        return counts

    assert placed(views)["canary"] == pytest.approx(200, abs=60)
    full = [replace(view, available_blocks=0) if SHARES[view.worker_id] else view for view in views]
    assert placed(full) == {"others": 2000}
    others_full = [view if SHARES[view.worker_id] else replace(view, available_blocks=0) for view in views]
    assert placed(others_full)["none"] == placed(views)["others"], "what is not the canary's waits for the others"
    leaving = [view if SHARES[view.worker_id] else replace(view, draining=True) for view in views]
    assert placed(leaving) == {"canary": 2000}, "there is nobody else"
