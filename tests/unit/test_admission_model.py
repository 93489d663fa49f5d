"""Admission under any order of events, held against what its docstring promises, and against a plain model."""

import os

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from router.admission.queues import QUANTUM, ClassQueue, TenantQueue
from router.admission.request import QueuedRequest, RequestInfo
from support.admission_site import Site, demand_of

EXAMPLES = int(os.environ.get("TANDEM_TRIALS", "0")) // 20 or 60


# ----------------------------------------------------------------------------------- order, with one place


class OnePlace(RuleBasedStateMachine):
    """One worker that holds one request at a time: who starts is then a question of order alone.

    The model sorts: the highest class (no share for those below), of it the tenant whose turn it is by a deficit round
    robin written as a loop that visits one tenant after the other, of its requests the earliest due.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = {"a": 1.0, "b": 3.0, "c": 0.25}
        self.site = Site([1000], lower_class_share=0, tenants={name: {"weight": w} for name, w in self.weights.items()})
        self.running = self.site.ask(1000, "a")
        self.rings: dict[int, list[str]] = {}
        self.deficits: dict[tuple[int, str], float] = {}
        self.visited: set[tuple[int, str]] = set()

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from([0, 0, 1, 7]),
        blocks=st.sampled_from([501, 600, 1000]),
        due=st.sampled_from([1e6, 2e6, 3e6]),
    )
    def ask(self, tenant: str, priority: int, blocks: int, due: float) -> None:
        waiting = self.site.ask(blocks, tenant, priority, first_token_by=due - self.site.now)
        assert waiting in self.site.waiting
        ring = self.rings.setdefault(priority, [])
        if tenant not in ring:
            ring.append(tenant)
            self.deficits[priority, tenant] = 0.0
        self.site.now += 0.001

    @precondition(lambda self: self.site.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiting = data.draw(st.sampled_from(list(self.site.waiting)))
        self.site.cancel(waiting)
        self._gone(waiting)

    @precondition(lambda self: self.site.waiting)
    @rule()
    def end(self) -> None:
        expected = self._next()
        self.site.end(self.running)
        (self.running,) = self.site.running
        assert self.running is expected
        self._gone(expected)

    def _of(self, priority: int, tenant: str) -> list[QueuedRequest]:
        return [w for w in self.site.waiting if (w.info.priority, w.info.tenant) == (priority, tenant)]

    def _next(self) -> QueuedRequest:
        priority = max(waiting.info.priority for waiting in self.site.waiting)
        ring = self.rings[priority]
        while True:
            at = priority, ring[0]
            first = min(self._of(*at), key=lambda waiting: (waiting.info.first_token_by, waiting.number))
            if at not in self.visited:
                self.visited.add(at)
                self.deficits[at] += QUANTUM * self.weights[ring[0]]
            if first.cost <= self.deficits[at]:
                self.deficits[at] -= first.cost
                return first
            self.visited.discard(at)
            ring.append(ring.pop(0))

    def _gone(self, waiting: QueuedRequest) -> None:
        at = waiting.info.priority, waiting.info.tenant
        if not self._of(*at):
            self.rings[at[0]].remove(at[1])
            self.visited.discard(at)
            del self.deficits[at]


def test_order() -> None:
    run_state_machine_as_test(OnePlace, settings=settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None))


# ------------------------------------------------------------------------------------------------ fairness


@given(
    weights=st.tuples(st.sampled_from([0.3, 1.0, 4.0]), st.sampled_from([1.0, 2.5])),
    costs=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), min_size=60, max_size=60),
    skipped=st.integers(0, 59),
)
def test_service_for_its_weight_differs_by_a_constant(
    weights: tuple[float, float], costs: list[tuple[int, int]], skipped: int
) -> None:
    """Over every interval in which both have something to start; beside a third that comes and goes."""
    queue = ClassQueue(0)
    numbers = iter(range(1000))

    def add(tenant: str, cost: int, weight: float) -> None:
        number = next(numbers)
        info = RequestInfo(tenant, 0, float(number))
        waiting = QueuedRequest.of(info, demand_of(1), [], number, 0.0)
        waiting.cost, waiting.need = cost, 1
        queue.add(waiting, weight)

    for cost_a, cost_b in costs:
        add("a", cost_a, weights[0])
        add("b", cost_b, weights[1])
    served = [(0.0, 0.0)]
    greatest = [0, 0]
    while "a" in queue.lines and "b" in queue.lines:
        if len(served) % 7 == skipped % 7:
            add("c", 777, 1.0)
        picked = queue.pick(lambda line: line.requests[0])
        queue.started(picked)
        if picked.info.tenant == "c":
            continue
        who = "ab".index(picked.info.tenant)
        greatest[who] = max(greatest[who], picked.cost)
        last = list(served[-1])
        last[who] += picked.cost / weights[who]
        served.append((last[0], last[1]))
    bound = QUANTUM + max(c for c, _ in costs) / weights[0] + max(c for _, c in costs) / weights[1]
    leads = [a - b for a, b in served]
    assert max(leads) - min(leads) <= 2 * bound
    for first in range(0, len(leads), 5):
        for last in range(first, len(leads)):
            assert abs(leads[last] - leads[first]) <= bound + 1e-6


def test_who_cannot_start_saves_up_nothing() -> None:
    queue = ClassQueue(0)
    for number, tenant in enumerate(["stuck", "goes"] * 50):
        waiting = QueuedRequest.of(RequestInfo(tenant, 0, 0.0), demand_of(1), [], number, 0.0)
        waiting.cost = 100
        queue.add(waiting, 1.0)

    def only(line: TenantQueue) -> QueuedRequest | None:
        return line.requests[0] if line.tenant == "goes" else None

    for _ in range(49):
        picked = queue.pick(only)
        assert picked is not None
        queue.started(picked)
    assert queue.lines["stuck"].deficit <= QUANTUM


# --------------------------------------------------------------------------------------------- everything


class Everything(RuleBasedStateMachine):
    """Several workers, sizes, classes, tenants; cancels, deaths, refusals, time. `Site.check` runs after each event."""

    @initialize(pools=st.lists(st.sampled_from([8, 20]), min_size=1, max_size=5), lenders=st.integers(0, 2))
    def start(self, pools: list[int], lenders: int) -> None:
        self.site = Site(
            pools,
            lenders,
            max_queued=8,
            max_queued_per_tenant=5,
            max_passed_s=1,
            max_passed_tokens=100,
            no_worker_grace_s=2,
            long_prompt_s=0.05,
            tenants={"a": {"max_running": 2}, "b": {"weight": 5}},
        )
        self.asked: list[QueuedRequest] = []
        self.names = len(pools)

    @rule(
        blocks=st.integers(1, 20),
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from([-2, -1, 0, 0, 3]),
        borrows=st.booleans(),
        limit=st.sampled_from([None, 0.05, 0.5, 5.0]),
        deadline=st.sampled_from([None, 3.0]),
    )
    def ask(
        self, blocks: int, tenant: str, priority: int, borrows: bool, limit: float | None, deadline: float | None
    ) -> None:
        times = {"first_token_by": limit, "deadline": deadline}
        given_times = {name: seconds for name, seconds in times.items() if seconds is not None}
        self.asked.append(self.site.ask(blocks, tenant, priority, blocks - 1 if borrows else 0, **given_times))

    @precondition(lambda self: self.site.running)
    @rule(data=st.data(), first_token=st.booleans())
    def end(self, data: st.DataObject, first_token: bool) -> None:
        waiting = data.draw(st.sampled_from(list(self.site.running)))
        if first_token:
            self.site.fleet.started(self.site.running[waiting])
        self.site.end(waiting)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.site.cancel(data.draw(st.sampled_from(self.asked)))

    @precondition(lambda self: self.site.running)
    @rule(data=st.data(), streaming=st.booleans(), by_worker=st.booleans())
    def comes_back(self, data: st.DataObject, streaming: bool, by_worker: bool) -> None:
        """Its worker refused it, or failed in mid-stream."""
        waiting = data.draw(st.sampled_from(list(self.site.running)))
        if by_worker:
            self.site.admission.refused_by_worker(self.site.running[waiting], self.site.now)
        waiting.info.streaming |= streaming and not by_worker
        self.site.end(waiting)
        blocks = waiting.demand.num_total_blocks
        self.asked.append(self.site.ask(blocks, usable=waiting.demand.num_usable_blocks, info=waiting.info))

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.5]))
    def wait(self, seconds: float) -> None:
        self.site.wait(seconds)

    @precondition(lambda self: len(self.site.workers) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.site.leave(data.draw(st.sampled_from(sorted(self.site.workers))))

    @rule(pool=st.sampled_from([8, 20]))
    def join(self, pool: int) -> None:
        if len(self.site.workers) < 7:
            self.site.join(f"d{self.names}", pool)
            self.names += 1

    @precondition(lambda self: self.lenders())
    @rule(data=st.data(), queued=st.sampled_from([0, 100, 3000]))
    def lender_reports(self, data: st.DataObject, queued: int) -> None:
        self.site.report(data.draw(st.sampled_from(self.lenders())), 10_000, queued)

    def lenders(self) -> list[str]:
        return [name for name in self.site.workers if name.startswith("p")]

    @invariant()
    def nobody_waits_on_an_idle_cluster(self) -> None:
        site = getattr(self, "site", None)
        if site is None or site.running or not site.waiting:
            return
        queued = site.fleet.snapshot.queued_prefill_tokens
        largest = site.fleet.snapshot.num_blocks[site.fleet.snapshot.decodes].max(initial=0)
        for waiting in site.waiting:
            excused = (
                waiting.demand.num_total_blocks > largest
                or waiting.info.not_before > site.now
                or waiting.held_until > site.now
                or queued.any()
                or site.admission.backoff.refusals
            )
            assert excused, waiting

    def teardown(self) -> None:
        """Whatever came: with the lenders idle and everybody who runs ending, nobody is left, and no load remains."""
        if (site := getattr(self, "site", None)) is None:
            return
        site.join("last", 40)
        for _ in range(200):
            for name in self.lenders():
                site.report(name, 10_000, 0)
            for waiting in list(site.running):
                site.end(waiting)
            site.wait(0.6)
            if not site.waiting and not site.running:
                break
        assert not site.waiting
        assert not site.running
        assert site.admission.reserved_workers() == {}
        for view in site.fleet.views():
            assert view.available_blocks == view.num_blocks
            assert view.queued_prefill_tokens == 0
        assert all(state.num_running == 0 for state in site.tenants.states.values())
        answered = len(site.started) + len(site.refused)
        assert answered <= len(self.asked) + sum(waiting.info.num_placed for waiting in self.asked)


def test_everything() -> None:
    steps = settings(max_examples=2 * EXAMPLES, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(Everything, settings=steps)


@given(
    large=st.integers(11, 20),
    small=st.lists(st.integers(1, 10), min_size=5, max_size=30),
    priority=st.sampled_from([0, -1]),
    durations=st.lists(st.integers(1, 8), min_size=5, max_size=5),
)
def test_nobody_waits_for_ever(large: int, small: list[int], priority: int, durations: list[int]) -> None:
    """Two workers of 20 blocks; small requests of its class come without end. The large one starts once it was passed
    for max_passed_s and then what ran on the worker kept for it has ended."""
    site = Site([20, 20], max_passed_s=2, lower_class_share=0.05)
    ends: list[tuple[float, QueuedRequest]] = []

    def step(number: int) -> None:
        waiting = site.ask(small[number % len(small)], f"t{number % 3}", priority)
        ends.append((site.now, waiting))
        for since, one in list(ends):
            if site.is_running(one) and site.now - since >= durations[one.number % 5]:
                site.end(one)
                ends.remove((since, one))
        site.wait(0.25)

    for number in range(40):
        step(number)
    waits = site.ask(large, "large", priority)
    asked_at = site.now
    number = 40
    while not site.is_running(waits):
        step(number)
        number += 1
        assert site.now - asked_at <= 2 + 2 * max(durations) + 3
