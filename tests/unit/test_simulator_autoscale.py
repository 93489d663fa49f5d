"""Simulated workers that come, go and switch; and a planner that has them do so."""

import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.roles import ROLES, Role
from planner.config import PolicyConfig, PoolConfig
from sizing.cluster.autoscale import Autoscale
from sizing.cluster.cluster import START_S, SimCluster, audit
from sizing.comparison.planned import autoscaled
from sizing.comparison.replay import Scenario, Setup, replay
from sizing.gpus import gpu_named
from sizing.models.model_shape import open_shape
from support.virtual_cluster import cluster_spec, random_requests, worker_spec
from workloads.request import BadSetup, EndState, Outcome, TraceRequest
from workloads.results import Slo
from workloads.traces.reading import RateSwing


class Moved:
    """A run whose workers change at times of the trace."""

    def __init__(
        self,
        changes: list[tuple[float, Callable[[SimCluster], object]]],
        requests: list[TraceRequest],
        prefill: int = 2,
        decode: int = 2,
        **spec: object,
    ) -> None:
        self.outcomes: list[Outcome] = []
        made = dataclasses.replace(cluster_spec(prefill, decode), **spec)  # type: ignore[arg-type]
        self.cluster = SimCluster(made, self.outcomes.append)
        for at_s, change in changes:
            self.cluster.clock.at(START_S + at_s, change, self.cluster)
        self.cluster.run(requests)
        until = self.cluster.clock.now + 60
        while self.cluster.clock.now < until and self.cluster.clock.step():
            pass

    @property
    def summary(self) -> list[tuple[object, ...]]:
        ordered = sorted(self.outcomes, key=lambda outcome: outcome.request.number)
        return [dataclasses.astuple(outcome) for outcome in ordered]


def all_well(run: Moved, count: int) -> None:
    """Nobody failed, and nothing is held anywhere."""
    assert len(run.outcomes) == count
    assert {outcome.end_state for outcome in run.outcomes} == {EndState.FINISHED}
    assert not audit(list(run.cluster.workers.values()))


def test_a_worker_that_is_added_serves_and_is_paid_for_from_the_moment_it_was_asked_for() -> None:
    requests = random_requests(1, 120, rate=20)
    run = Moved([(1.0, lambda c: c.add("decode-9", worker_spec("decode"), 2.0))], requests, decode=1)
    all_well(run, 120)
    by_it = [o for o in run.outcomes if o.receipt is not None and o.receipt.placement.decode_worker == "decode-9"]
    assert by_it
    assert min(outcome.first_token_at for outcome in by_it) > START_S + 3.0
    assert run.cluster.hires["decode-9"].began_at == START_S + 1.0


@pytest.mark.parametrize("drain_s", [30.0, 0.05])
def test_workers_that_are_removed_under_load_lose_nothing(drain_s: float) -> None:
    requests = random_requests(2, 80, rate=20)
    run = Moved(
        [(1.0, lambda c: c.remove("decode-0", drain_s)), (1.5, lambda c: c.remove("prefill-1", drain_s))], requests
    )
    all_well(run, 80)
    assert set(run.cluster.workers) == {"prefill-0", "decode-1"}
    assert {worker.worker_id for worker in run.cluster.gone} == {"decode-0", "prefill-1"}
    for name in ("decode-0", "prefill-1"):
        ended_at = run.cluster.hires[name].ended_at
        assert ended_at is not None
        assert START_S + 1.0 <= ended_at < START_S + 1.5 + drain_s + 11
    handed_over = [outcome for outcome in run.outcomes if outcome.num_attempts > 1]
    assert bool(handed_over) == (drain_s < 1)


def test_one_that_is_removed_before_it_came_never_does() -> None:
    def change(cluster: SimCluster) -> None:
        cluster.add("decode-9", worker_spec("decode"), 5.0)
        cluster.clock.after(1.0, cluster.remove, "decode-9")

    run = Moved([(0.5, change)], random_requests(3, 30, rate=10))
    all_well(run, 30)
    assert "decode-9" not in run.cluster.workers
    rental = run.cluster.hires["decode-9"]
    assert rental.ended_at == rental.began_at + 1.0


def test_a_switched_worker_has_its_cache_and_its_new_work() -> None:
    """The only prefill worker becomes the second decode worker, and a decode worker takes its place."""

    def change(cluster: SimCluster) -> None:
        decode, prefill = (worker_spec(role).limits.budget for role in ("decode", "prefill"))
        cluster.switch("prefill-0", "decode", decode, 0.5, drain_s=0.1)
        cluster.switch("decode-0", "prefill", prefill, 0.5, drain_s=0.1)

    requests = random_requests(4, 120, rate=15)
    run = Moved([(3.0, change)], requests, prefill=1, decode=2)
    all_well(run, 120)
    assert {name: worker.role for name, worker in run.cluster.workers.items()} == {
        "prefill-0": "decode",
        "decode-0": "prefill",
        "decode-1": "decode",
    }
    later = [o.receipt for o in run.outcomes if o.sent_at > START_S + 5.0 and o.receipt is not None]
    by_it = [receipt for receipt in later if receipt.placement.decode_worker == "prefill-0"]
    assert any(receipt.kv.reused_blocks for receipt in by_it[:3]), "what it computed for others is there"
    assert "decode-0" in {receipt.placement.lender for receipt in later}
    assert not any(receipt.placement.decode_worker == "decode-0" for receipt in later)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_whatever_changes_nothing_is_lost_and_runs_of_steps_change_nothing(seed: int) -> None:
    """Workers come, go, switch and die at random; with every step by itself it is the same to the bit."""

    def changes() -> list[tuple[float, Callable[[SimCluster], object]]]:
        rng = random.Random(seed)
        found: list[tuple[float, Callable[[SimCluster], object]]] = []
        for number in range(6):
            at_s, role = rng.uniform(0, 4), rng.choice(ROLES)
            what, drain_s = rng.randrange(4), rng.choice([0.05, 2.0])
            pick = rng.random()

            def change(
                cluster: SimCluster,
                what: int = what,
                role: Role = role,
                drain_s: float = drain_s,
                pick: float = pick,
                number: int = number,
            ) -> None:
                if what == 0:
                    cluster.add(f"{role}-{90 + number}", worker_spec(role), 0.7)
                    return
                there = [
                    w
                    for n, w in cluster.workers.items()
                    if n not in ("decode-0", "prefill-0") and not w.requests.draining
                ]
                if not there:
                    return
                worker = there[int(pick * len(there))]
                if what == 1:
                    cluster.remove(worker.worker_id, drain_s)
                elif what == 2:
                    cluster.kill(worker.worker_id)
                else:
                    other: Role = "prefill" if worker.role == "decode" else "decode"
                    budget = worker_spec(other).limits.budget
                    cluster.switch(worker.worker_id, other, budget, 0.3, drain_s)

            found.append((at_s, change))
        return found

    requests = random_requests(seed, 60, rate=15)
    by_runs = Moved(changes(), requests, prefill=2, decode=3)
    all_well(by_runs, 60)
    by_steps = Moved(changes(), requests, prefill=2, decode=3, skip=False)
    assert by_runs.summary == by_steps.summary


# ------------------------------------------------------------------ the swing


def test_a_swing_moves_requests_and_keeps_their_order_and_number() -> None:
    even = [TraceRequest(number, number * 0.1, 10, 10) for number in range(10_000)]
    swung = list(RateSwing(even, 10, 500.0))
    assert [request.number for request in swung] == list(range(10_000))
    times = [request.arrival_s for request in swung]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(even[-1].arrival_s, abs=0.5)
    lowest, highest = (sum(abs(at_s - middle) < 10 for at_s in times) for middle in (500, 250))
    assert highest / lowest == pytest.approx(10, rel=0.1)


def test_a_swing_of_one_changes_nothing_and_what_is_none_is_named() -> None:
    even = [TraceRequest(number, number * 0.37, 10, 10) for number in range(100)]
    assert list(RateSwing(even, 1, 10.0)) == even
    for factor, period in ((0.5, 10.0), (2.0, 0.0)):
        with pytest.raises(BadSetup):
            RateSwing(even, factor, period)


# ------------------------------------------------------------------ a planner at work

SETUP = Setup(open_shape(None), gpu_named("A100"), gpus=2, slo=Slo(5.0, 0.1), block_tokens=256)


def swinging(count: int) -> list[TraceRequest]:
    """Prompts that take one to three seconds."""
    rng, at_s = random.Random(0), 0.0
    even = []
    for number in range(count):
        at_s += rng.expovariate(1.0)
        even.append(TraceRequest(number, at_s, rng.randint(8000, 24_000), rng.randint(10, 120)))
    return list(RateSwing(even, 8, at_s))


def test_pools_follow_the_load_and_nothing_is_lost() -> None:
    policy = PolicyConfig(
        prefill=PoolConfig(max_workers=8),
        decode=PoolConfig(max_workers=4),
        ttft_s=5.0,
        itl_s=0.1,
        start_s=5.0,
        down_after_s=10.0,
        prefill_tokens_per_s=9000.0,
    )
    requests = swinging(140)
    run = replay(SETUP, Scenario("conditional", 1, 1, autoscale=Autoscale(policy)), requests)
    assert run.results.finished == 140
    sizes = [size.prefill for size in run.sizes]
    assert sizes[0] == 1
    assert max(sizes) >= 3
    assert sizes[-1] < max(sizes)
    assert all(size.wanted_prefill <= 8 and size.wanted_decode <= 4 for size in run.sizes)
    most = max(size.prefill + size.decode for size in run.sizes)
    assert run.results.gpu_hours < 0.8 * most * run.results.duration_s / 3600
    again = replay(SETUP, Scenario("conditional", 1, 1, autoscale=Autoscale(policy)), requests)
    assert (again.results, again.sizes) == (run.results, run.sizes)


def test_what_a_planner_is_given_by_the_command_is_checked() -> None:
    assert autoscaled(SETUP, 4, 30.0).name == "conditional 1P:1D autoscaled"
    for most, start_s in ((0, 30.0), (4, -1.0)):
        with pytest.raises(BadSetup):
            autoscaled(SETUP, most, start_s)


def test_a_fixed_fleet_is_paid_for_all_the_time() -> None:
    requests = list(itertools.islice(swinging(60), 60))
    run = replay(SETUP, Scenario("conditional", 1, 1), requests)
    assert run.results.arrivals_s == pytest.approx(requests[-1].arrival_s)
    assert run.results.gpu_hours == pytest.approx(2 * run.results.duration_s / 3600)
    assert run.results.goodput_per_gpu == pytest.approx(run.results.kept / run.results.arrivals_s / 2)
