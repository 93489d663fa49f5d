"""Admission: events in, starts and refusals out. The package's docstring says what holds after each."""

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.keys import BlockKey
from router.admission import refusals
from router.admission.bucket import TokenBucket
from router.admission.config import AdmissionConfig
from router.admission.forecast import Forecast
from router.admission.keeping import Keeping, is_owed
from router.admission.lenders import Lenders
from router.admission.limits import Tenants
from router.admission.queues import ClassQueue, Line
from router.admission.refusals import Refusal
from router.admission.request import Claim, Waiting
from router.admission.room import Room, could_hold, largest_pool
from router.demand import Demand
from router.fleet import Fleet, Placed, Worker
from router.placement import Decision
from router.rates import Ints
from router.snapshot import Workers

HOLDS_PER_S = 200
"""Decisions a second that may end in holding a request back; one costs 0.4 ms with 128 workers."""
RECHECK_S = 0.25
"""A request held back is looked at again after so long, though the lender it was held for is as deep as before."""
RECHECKS_PER_S = 100
"""Of all of them together."""
REFUSAL_FADES_S = 0.1
"""A worker that has refused is not asked for as much again until it reports, or for so long."""
MAX_OWED = 1 << 20
"""Tokens: what a class below can save up while it could not start."""


@dataclass(frozen=True, slots=True)
class Started:
    """`waiting` has its place; `ended` must follow."""

    waiting: Waiting
    placed: Placed
    decision: Decision


@dataclass(frozen=True, slots=True)
class Refused:
    """`waiting` waits no more."""

    waiting: Waiting
    refusal: Refusal


Outcome = Started | Refused


@dataclass(frozen=True, slots=True)
class _RefusedBy:
    """A worker's word that it has no room for so much."""

    num_blocks: int
    load: object
    """Its report then; the next one says more."""
    at: float


class Admission:
    """All that waits for one fleet. Every method that takes `now` is an event; times never go back."""

    def __init__(self, fleet: Fleet, config: AdmissionConfig, tenants: Tenants) -> None:
        self._fleet = fleet
        self._config = config
        self._tenants = tenants
        self.num_refused: Counter[str] = Counter()
        """By reason, for ever."""
        self.num_started = 0
        self._queues: dict[int, ClassQueue] = {}
        self._numbers = itertools.count()
        self._running: dict[Placed, Waiting] = {}
        self._forecast = Forecast()
        self._keeping = Keeping(config)
        self._lenders = Lenders(config)
        self._refused_by: dict[Worker, _RefusedBy] = {}
        self._holds = TokenBucket(HOLDS_PER_S, 32)
        self._times: list[tuple[float, int, Waiting | None]] = []
        """A heap: when time alone may change something."""
        self._known: tuple[Workers, int] | None = None
        """For which the requests were measured, and its largest pool."""

    # ------------------------------------------------------------------ events

    def arrived(
        self, claim: Claim, demand: Demand, keys: Sequence[BlockKey], now: float
    ) -> tuple[Waiting, list[Outcome]]:
        """It waits for a place from now on, and has perhaps got one or been refused in this moment, or others have."""
        waiting = Waiting.of(claim, demand, keys, next(self._numbers), now)
        self._measure(waiting, now)
        if claim.not_before > now:
            self._at(claim.not_before, waiting)
        if (queue := self._queues.get(claim.priority)) is None:
            queue = self._queues[claim.priority] = ClassQueue(claim.priority)
        self._forecast.advance(now)
        queue.add(waiting, self._tenants.weight(claim.tenant))
        waiting.queued = True
        outcomes = self._settle(now)
        if waiting.queued:
            self._consider(waiting, now, outcomes)
        self._forecast.waiting(self._queues)
        return waiting, outcomes

    def changed(self, now: float) -> list[Outcome]:
        """Workers, their reports, or the time."""
        self._forecast.advance(now)
        outcomes = self._settle(now)
        self._forecast.waiting(self._queues)
        return outcomes

    def withdrawn(self, waiting: Waiting, now: float) -> list[Outcome]:
        """Its client is gone."""
        if waiting.queued:
            self._remove(waiting)
        return self.changed(now)

    def ended(self, placed: Placed, now: float) -> list[Outcome]:
        """Once for each start."""
        waiting = self._running.pop(placed)
        self._tenants.ended(waiting.claim.tenant)
        self._lenders.ended(placed)
        self._fleet.ended(placed)
        return self.changed(now)

    def refused_by_worker(self, placed: Placed, now: float) -> None:
        """For want of room; `ended` follows, and `arrived` unless this raises Overloaded, having been too often. The
        claim pauses, the longer the more often it happened."""
        claim = self._running[placed].claim
        claim.num_refusals += 1
        claim.not_before = now + min(0.5, 0.01 * 2 ** min(claim.num_refusals - 1, 10))
        worker = placed.decode
        needed = placed.demand.num_promised_blocks(worker.hello.reserve_output_tokens)
        self._refused_by[worker] = _RefusedBy(needed, worker.load, now)
        self._at(now + REFUSAL_FADES_S, None)
        if claim.num_refusals > self._config.max_refusals:
            refusal = refusals.too_often_refused(claim.num_refusals, self._config.default_retry_after_s)
            self.refuse(refusal)
            raise refusal.error

    # ------------------------------------------------------------------ questions

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def num_running(self) -> int:
        return len(self._running)

    def waiting_by_class(self) -> dict[int, int]:
        return {priority: len(queue) for priority, queue in self._queues.items()}

    def waiting_by_tenant(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for queue in self._queues.values():
            counts.update({tenant: len(line.requests) for tenant, line in queue.lines.items()})
        return dict(counts)

    def kept_workers(self) -> dict[str, Waiting]:
        """For whom, by worker."""
        return {kept.worker_id: kept.waiting for kept in self._keeping.kept}

    def next_time(self) -> float | None:
        """When `changed` is to be called even if nothing has."""
        while self._times and (waiting := self._times[0][2]) is not None and not waiting.queued:
            heapq.heappop(self._times)
        return self._times[0][0] if self._times else None

    def refuse(self, refusal: Refusal) -> None:
        """Count one that never waited."""
        self.num_refused[refusal.reason] += 1

    # ------------------------------------------------------------------ the turn

    def _settle(self, now: float) -> list[Outcome]:
        """Start whoever can start, refuse whoever can no longer."""
        outcomes: list[Outcome] = []
        self._measure_all(now)
        self._expire(now, outcomes)
        while self._queues and self._start_one(now, outcomes):
            pass
        return outcomes

    def _start_one(self, now: float, outcomes: list[Outcome]) -> bool:
        """False when nobody can start."""
        self._keeping.arrange(self._queues, self._fleet.snapshot, now, self._tenants.may_start)
        refused = self._refused(now)
        blocked: list[Waiting] = []
        for queue, early in self._turns():
            turn = _Turn(self, queue, refused, early, now, blocked)
            while (waiting := queue.pick(turn.first_of)) is not None:
                if self._holds.wait_s(1, now):
                    self._at(now + 1 / HOLDS_PER_S, None)
                    return False
                decision = self._fleet.decide(waiting.demand, waiting.keys, turn.room_of(waiting).available)
                assert decision is not None
                if self._hold(waiting, decision, turn.lender_limit_s, now):
                    continue
                if not self._misses(waiting, decision, now, outcomes):
                    self._start(waiting, decision, blocked, now, outcomes)
                return True
        return False

    def _turns(self) -> list[tuple[ClassQueue, bool]]:
        """Classes in the order in which they may start now; and whether each goes before one above it, being owed."""
        turns: deque[tuple[ClassQueue, bool]] = deque()
        for priority in sorted(self._queues):
            queue = self._queues[priority]
            if queue.gives_way and turns:
                turns = deque((lower, True) for lower, _ in turns)
                turns.append((queue, False))
            else:
                turns.appendleft((queue, False))
        return list(turns)

    def _refused(self, now: float) -> Ints:
        """[W]: what each worker has said it has no room for."""
        workers = self._fleet.snapshot
        column = np.full(len(workers.ids), np.iinfo(np.int64).max)
        for worker, refused in list(self._refused_by.items()):
            there = self._fleet.worker(worker.worker_id) is worker and worker.worker_id in workers.row_of
            if not there or worker.load is not refused.load or now >= refused.at + REFUSAL_FADES_S:
                del self._refused_by[worker]
            else:
                column[workers.row_of[worker.worker_id]] = refused.num_blocks
        return column

    def _hold(self, waiting: Waiting, decision: Decision, limit_s: float, now: float) -> bool:
        """Whether it is better to wait here and choose later."""
        state = self._fleet.snapshot, self._fleet.rates
        deep = self._lenders.deep(decision, *state, limit_s)
        if not deep and not self._lenders.crowded(decision, *state):
            return False
        self._holds.take(1, now)
        waiting.held_by = decision.lender_id if deep else None
        waiting.held_until = now + max(RECHECK_S, self.num_waiting / RECHECKS_PER_S)
        self._at(waiting.held_until, waiting)
        return True

    def _start(
        self, waiting: Waiting, decision: Decision, blocked: list[Waiting], now: float, outcomes: list[Outcome]
    ) -> None:
        claim = waiting.claim
        self._forecast.started(claim.priority, waiting.cost)
        for passed in blocked:
            if passed is not waiting and passed.passed_at is None:
                self._keeping.passed(passed, now, self._queues[passed.claim.priority])
                self._at(now + self._config.max_passed_s, passed)
        self._account(claim.priority, waiting.cost)
        self._queues[claim.priority].started(waiting)
        self._forget(waiting)
        placed = self._fleet.placed(decision, waiting.demand, waiting.keys)
        self._lenders.started(placed, decision, self._fleet.snapshot, self._fleet.rates)
        self._tenants.started(claim.tenant, now)
        self._running[placed] = waiting
        claim.num_placed += 1
        self.num_started += 1
        outcomes.append(Started(waiting, placed, decision))

    def _account(self, priority: int, cost: int) -> None:
        """Which classes are passed, and which are owed what, by a start."""
        share = self._config.lower_class_share
        for other in sorted(self._queues):
            queue = self._queues[other]
            if other >= priority or is_owed(other, priority, self._queues):
                queue.passed_tokens += cost
            if other > priority:
                queue.owed = max(-float(cost), queue.owed - (1 - share) * cost)
        if min(self._queues) < priority:
            queue = self._queues[priority]
            queue.owed = min(MAX_OWED, queue.owed + share * cost)

    # ------------------------------------------------------------------ refusals

    def _consider(self, waiting: Waiting, now: float, outcomes: list[Outcome]) -> None:
        """It has to wait: whether there is a place for it, and whether it will have its turn in time."""
        claim = waiting.claim
        if claim.num_placed == 0 and (loser := self._one_too_many(waiting)) is not None:
            loser_waiting, refusal = loser
            self._refuse(loser_waiting, refusal, outcomes)
            if loser_waiting is waiting:
                return
        if claim.due_at == math.inf:
            return
        waiting.least_ttft_s = self._fleet.least_ttft_s(waiting.demand, waiting.keys) or 0.0
        wait_s = self._wait_s(waiting)
        left_s = waiting.start_by - now
        if wait_s > left_s and not claim.streaming:
            refusal = refusals.predicted_miss(wait_s, waiting.least_ttft_s, claim.due_at - now)
            self._refuse(waiting, refusal, outcomes)
        else:
            self._at(waiting.start_by, waiting)

    def _wait_s(self, waiting: Waiting) -> float:
        own = self._queues[waiting.claim.priority]
        higher = sum(queue.tokens for priority, queue in self._queues.items() if priority > own.priority)
        return self._forecast.wait_s(waiting, own, higher)

    def _one_too_many(self, newcomer: Waiting) -> tuple[Waiting, Refusal] | None:
        """Who must go since the newcomer came."""
        claim, config = newcomer.claim, self._config
        of_tenant = sum(
            len(queue.lines[claim.tenant].requests) for queue in self._queues.values() if claim.tenant in queue.lines
        )
        if of_tenant > config.max_queued_per_tenant:
            tenant = claim.tenant
            full = refusals.tenant_queue_full(tenant, of_tenant - 1, self._retry_after(newcomer))
        elif (num_waiting := self.num_waiting) > config.max_queued:
            tenant, full = None, refusals.queue_full(num_waiting - 1, self._retry_after(newcomer))
        else:
            return None
        for priority in sorted(other for other in self._queues if other < claim.priority):
            if (loser := self._queues[priority].last(tenant)) is not None:
                return loser, refusals.displaced(priority, claim.priority, self._retry_after(loser))
        return newcomer, full

    def _retry_after(self, waiting: Waiting) -> float:
        """By then who stands before it now has started, it is predicted."""
        return self._wait_s(waiting) or self._config.default_retry_after_s

    def _misses(self, waiting: Waiting, decision: Decision, now: float, outcomes: list[Outcome]) -> bool:
        """It could start, but behind prompts that are queued there its first token would come too late. Where none is
        queued it starts whatever is predicted, and rates are learnt."""
        claim, workers = waiting.claim, self._fleet.snapshot
        if claim.streaming or now + decision.predicted_ttft_s <= claim.due_at:
            return False
        rows = [workers.row_of[name] for name in (decision.decode_id, decision.lender_id) if name]
        if not workers.queued_prefill_tokens[rows].any():
            return False
        refusal = refusals.predicted_miss(0.0, decision.predicted_ttft_s, claim.due_at - now)
        self._refuse(waiting, refusal, outcomes)
        return True

    def _expire(self, now: float, outcomes: list[Outcome]) -> None:
        while self._times and self._times[0][0] <= now:
            _, _, waiting = heapq.heappop(self._times)
            if waiting is None or not waiting.queued:
                continue
            since, grace_s = waiting.unholdable_since, self._config.no_worker_grace_s
            if since is not None and now >= since + grace_s:
                largest = largest_pool(self._fleet.snapshot)
                total = waiting.demand.num_total_blocks
                refusal = refusals.no_worker(total, largest if largest >= 0 else None, grace_s)
                self._refuse(waiting, refusal, outcomes)
            elif now >= waiting.claim.deadline:
                self._refuse(waiting, refusals.deadline_passed(), outcomes)
            elif now >= waiting.start_by:
                waited_s = now - waiting.claim.arrived_at
                refusal = refusals.too_late(waited_s, waiting.least_ttft_s, self._retry_after(waiting))
                self._refuse(waiting, refusal, outcomes)

    def _refuse(self, waiting: Waiting, refusal: Refusal, outcomes: list[Outcome]) -> None:
        self._remove(waiting)
        self.num_refused[refusal.reason] += 1
        outcomes.append(Refused(waiting, refusal))

    # ------------------------------------------------------------------ books

    def _measure_all(self, now: float) -> None:
        """When the workers are others than before: what each request needs of them, and whether any could hold it."""
        workers = self._fleet.snapshot
        largest = largest_pool(workers)
        if self._known is not None and self._known[0] is workers and self._known[1] == largest:
            return
        self._known = workers, largest
        for queue in self._queues.values():
            for waiting in queue:
                self._measure(waiting, now)
            for line in queue.lines.values():
                line.measured_anew()

    def _measure(self, waiting: Waiting, now: float) -> None:
        waiting.measure(self._fleet.snapshot)
        if could_hold(waiting.demand, self._fleet.snapshot):
            waiting.unholdable_since = None
        elif waiting.unholdable_since is None:
            waiting.unholdable_since = now
            self._at(now + self._config.no_worker_grace_s, waiting)

    def _remove(self, waiting: Waiting) -> None:
        self._queues[waiting.claim.priority].remove(waiting)
        self._forget(waiting)

    def _forget(self, waiting: Waiting) -> None:
        """It is out of its line."""
        waiting.queued = False
        self._keeping.forget(waiting)
        if not self._queues[waiting.claim.priority]:
            del self._queues[waiting.claim.priority]

    def _at(self, when: float, waiting: Waiting | None) -> None:
        """Look again then."""
        if when < math.inf:
            heapq.heappush(self._times, (when, next(self._numbers), waiting))


class _Turn:
    """One class's chance to start something: what it may take of the workers, and who of a line could go."""

    def __init__(
        self, admission: Admission, queue: ClassQueue, refused: Ints, early: bool, now: float, blocked: list[Waiting]
    ) -> None:
        """`early`: before a class above, being owed. `blocked` gets those that had their turn and no room."""
        self._fleet, self._keeping = admission._fleet, admission._keeping
        self._lenders, self._tenants = admission._lenders, admission._tenants
        self._priority, self._refused, self._now, self._blocked = queue.priority, refused, now, blocked
        config = admission._config
        batch = queue.priority < 0
        self._block_share = config.batch_block_share if batch else 1.0
        # Who goes before a class above waits no longer at a lender than that class.
        self.lender_limit_s = config.max_batch_lender_queue_s if batch and not early else config.max_lender_queue_s
        self._closed = self._keeping.rows_closed_to(queue.priority, admission._queues, self._fleet.snapshot)
        self._room = self._without(self._closed)

    def room_of(self, waiting: Waiting) -> Room:
        """With the worker kept for it."""
        row = self._keeping.row_for(waiting, self._fleet.snapshot)
        return self._room if row is None else self._without(self._closed - {row})

    def first_of(self, line: Line) -> Waiting | None:
        """The first of the line that could start now."""
        if not self._tenants.may_start(line.tenant):
            return None
        kept = self._keeping.of_line(line, self._priority)
        if kept is not None and self._ready(kept) and self.room_of(kept).fits(kept):
            return kept
        found = None
        if line.least_need <= self._room.greatest:
            found = next(
                (waiting for waiting in line.requests if self._ready(waiting) and self._room.fits(waiting)), None
            )
        head = line.requests[0]
        if head is not found and self._ready(head) and not self._room.fits(head):
            self._blocked.append(head)
        return found

    def _ready(self, waiting: Waiting) -> bool:
        """Nothing but room may keep it waiting."""
        if waiting.claim.not_before > self._now or waiting.unholdable_since is not None:
            return False
        if waiting.held_until <= self._now:
            return True
        if waiting.held_by is None:
            return False
        return self._lenders.queue_s(waiting.held_by, self._fleet.snapshot, self._fleet.rates) <= self.lender_limit_s

    def _without(self, rows: frozenset[int]) -> Room:
        return Room.of(self._fleet.snapshot, rows, self._refused, self._block_share)
