"""Admission: events in, starts and refusals out.

The package's docstring lists the invariants after each event.
"""

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.block_keys import BlockKey
from router.admission import refusals
from router.admission.config import AdmissionConfig
from router.admission.limits.tenant_limits import RateLimiter, TokenBucket
from router.admission.queues import ClassQueue, WaitForecast
from router.admission.refusals import Refusal
from router.admission.request import QueuedRequest, RequestInfo, cost_of
from router.admission.scheduling_round import AdmissionParts, RoundState, SchedulingRound
from router.admission.workers.capacity import (
    CapacityBackoff,
    LenderLoad,
    Reservations,
    could_hold,
    is_of_gone_revision,
    is_owed,
    largest_pool,
)
from router.admission.workers.circuit_breaker import CircuitBreaker
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import ActivePlacement
from router.placement.place import Decision
from router.placement.worker_table import WorkerTable

HOLDS_PER_S = 200
"""Decisions per second that may end in holding a request back; one costs 0.4 ms with 128 workers."""
RECHECK_S = 0.25
"""Seconds after which a request held back is tried again, even if its lender is as busy as before."""
RECHECKS_PER_S = 100
"""Largest number of such tries per second, over all requests."""
MAX_EMPTY = 64
"""Empty classes that are remembered; clients choose priorities freely."""
MAX_OWED = 1 << 20
"""Tokens that a lower class can be owed while it could not start."""


@dataclass(frozen=True, slots=True)
class Started:
    """Outcome: `waiting` has a placement; `ended` must follow."""

    waiting: QueuedRequest
    placed: ActivePlacement
    decision: Decision


@dataclass(frozen=True, slots=True)
class Refused:
    """Outcome: `waiting` is refused."""

    waiting: QueuedRequest
    refusal: Refusal


Outcome = Started | Refused


class Admission:
    """Admission of one fleet.

    Every method that takes `now` is an event; times never go back.
    """

    def __init__(self, fleet: Fleet, config: AdmissionConfig, tenants: RateLimiter) -> None:
        self._fleet = fleet
        self._config = config
        self._tenants = tenants
        self.num_refused: Counter[str] = Counter()
        """Refusals by reason, since the start."""
        self.queues: dict[int, ClassQueue] = {}
        """Queues by priority."""
        self._numbers = itertools.count()
        self.running: dict[ActivePlacement, tuple[QueuedRequest, float]] = {}
        """Running requests and their start times."""
        self.forecast = WaitForecast()
        self._reservations = Reservations(config)
        self._lenders = LenderLoad(config)
        self.backoff = CapacityBackoff()
        self._failing = CircuitBreaker(fleet)
        self._parts = AdmissionParts(config, fleet, tenants, self._reservations, self._lenders)
        self._holds = TokenBucket(HOLDS_PER_S, 32)
        self._times: list[tuple[float, int, QueuedRequest | None]] = []
        """Heap of times at which time alone may change something."""
        self._known: tuple[WorkerTable, int, int] | None = None
        """Worker table for which requests were measured, its largest pool, and the number of the roster's changes."""

    # ------------------------------------------------------------------ events

    def arrived(
        self, info: RequestInfo, demand: Demand, keys: Sequence[BlockKey], now: float
    ) -> tuple[QueuedRequest, list[Outcome]]:
        """Queue a request.

        The outcomes may concern it and others.
        """
        waiting = QueuedRequest.of(info, demand, keys, next(self._numbers), now)
        self._measure(waiting, now)
        if info.not_before > now:
            self._at(info.not_before, waiting)
        if (queue := self.queues.get(info.priority)) is None:
            queue = self.queues[info.priority] = ClassQueue(info.priority)
        self.forecast.advance(now)
        queue.add(waiting, self._tenants.weight(info.tenant))
        waiting.queued = True
        outcomes = self._settle(now)
        if waiting.queued:
            self._consider(waiting, now, outcomes)
        self.forecast.waiting(self._waiting_classes())
        return waiting, outcomes

    def changed(self, now: float) -> list[Outcome]:
        """Process a change of workers, their reports, or the time."""
        due = bool(self._times) and self._times[0][0] <= now
        if not (due or self.num_waiting or self.forecast.anybody_waits):
            return []  # the case of most reports
        self.forecast.advance(now)
        outcomes = self._settle(now)
        self.forecast.waiting(self._waiting_classes())
        return outcomes

    def withdrawn(self, waiting: QueuedRequest, now: float) -> list[Outcome]:
        """Remove a request whose client is gone."""
        if waiting.queued:
            self._remove(waiting)
        return self.changed(now)

    def ended(self, placed: ActivePlacement, now: float) -> list[Outcome]:
        """Process the end of a placement; once for each start."""
        waiting, started_at = self.running.pop(placed)
        if (again_at := self._failing.ended(placed, started_at, now)) is not None:
            self._at(again_at, None)
        if placed.started:
            self.forecast.ended(waiting, now - started_at)
        self._tenants.ended(waiting.info.tenant, waiting.num_sequences)
        self._lenders.ended(placed)
        self._fleet.ended(placed)
        return self.changed(now)

    def refused_by_worker(self, placed: ActivePlacement, now: float) -> None:
        """Process a worker's refusal for lack of blocks; `ended` follows, and then `arrived`.

        Raises Overloaded after too many refusals. The request pauses, longer with each refusal.
        """
        info = self.running[placed][0].info
        info.num_refusals += 1
        info.not_before = now + min(0.5, 0.01 * 2 ** min(info.num_refusals - 1, 10))
        worker = placed.decode
        needed = placed.demand.num_blocks_to_reserve(worker.hello.reserve_output_tokens)
        self._at(self.backoff.add(worker, needed, now), None)
        if info.num_refusals > self._config.max_refusals:
            refusal = refusals.too_often_refused(info.num_refusals, refusals.DEFAULT_RETRY_AFTER_S)
            self.refuse(refusal)
            raise refusal.error

    # ------------------------------------------------------------------ questions

    @property
    def num_waiting(self) -> int:
        return sum(queue.num_waiting for queue in self.queues.values())

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the queued requests."""
        return sum(waiting.demand.num_tokens for queue in self.queues.values() for waiting in queue)

    def expected_wait_s(self, priority: int, demand: Demand, now: float) -> float:
        """Return the predicted wait of a request that arrived now, last of its class.

        0 where nothing waits before it, or nothing is known.
        """
        self.forecast.advance(now)
        queues = self.queues
        own = queues[priority].tokens if priority in queues else 0
        higher = sum(queue.tokens for other, queue in queues.items() if other > priority)
        reserve = max(self._fleet.snapshot.reserves, default=0)
        return self.forecast.wait_behind_s(priority, own, higher, cost_of(demand, reserve))

    def reserved_workers(self) -> dict[str, QueuedRequest]:
        """Return the waiting request for which each reserved worker is kept."""
        return {kept.worker_id: kept.waiting for kept in self._reservations.kept}

    def next_time(self) -> float | None:
        """Return when `changed` should be called even without a change."""
        while self._times and (waiting := self._times[0][2]) is not None and not waiting.queued:
            heapq.heappop(self._times)
        return self._times[0][0] if self._times else None

    def refuse(self, refusal: Refusal) -> None:
        """Count the refusal of a request that never waited."""
        self.num_refused[refusal.reason] += 1

    # ------------------------------------------------------------------ the turn

    def _settle(self, now: float) -> list[Outcome]:
        """Start every request that can start, and refuse those that no longer can."""
        outcomes: list[Outcome] = []
        self._failing.resume(now)
        self._measure_all(now)
        self._expire(now, outcomes)
        while self.num_waiting and self._start_one(now, outcomes):
            pass
        return outcomes

    def _start_one(self, now: float, outcomes: list[Outcome]) -> bool:
        """Start one request.

        Returns False when none can start.
        """
        self._reservations.arrange(self.queues, self._fleet.snapshot, now, self._tenants.may_start)
        moment = RoundState(now, self.backoff.column(self._fleet, now))
        for queue, early in self._turns():
            turn = SchedulingRound(self._parts, self.queues, queue, early, moment)
            if turn.hopeless():
                continue
            while (waiting := queue.pick(turn.first_of)) is not None:
                if self._holds.wait_s(1, now):
                    self._at(now + 1 / HOLDS_PER_S, None)
                    return False
                decision = self._fleet.decide(waiting.demand, waiting.keys, turn.capacity_of(waiting).available)
                assert decision is not None
                if self._hold(waiting, decision, turn.lender_limit_s, now):
                    continue
                if not self._misses(waiting, decision, now, outcomes):
                    self._start(waiting, decision, moment.blocked, now, outcomes)
                return True
        return False

    def _turns(self) -> list[tuple[ClassQueue, bool]]:
        """Return the classes in starting order, and whether each overtakes a higher class that owes it."""
        turns: deque[tuple[ClassQueue, bool]] = deque()
        for priority in sorted(self._waiting_classes()):
            queue = self.queues[priority]
            if queue.gives_way and turns:
                turns = deque((lower, True) for lower, _ in turns)
                turns.append((queue, False))
            else:
                turns.appendleft((queue, False))
        return list(turns)

    def _hold(self, waiting: QueuedRequest, decision: Decision, limit_s: float, now: float) -> bool:
        """Return whether a request should wait here for a better choice of lender."""
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
        self,
        waiting: QueuedRequest,
        decision: Decision,
        blocked: list[QueuedRequest],
        now: float,
        outcomes: list[Outcome],
    ) -> None:
        info = waiting.info
        self.forecast.started(info.priority, waiting.cost)
        for passed in blocked:
            if passed is not waiting and passed.passed_at is None:
                self._reservations.passed(passed, now, self.queues[passed.info.priority])
                self._at(now + self._config.max_passed_s, passed)
        self._account(info.priority, waiting.cost)
        self.queues[info.priority].started(waiting)
        self._forget(waiting)
        placed = self._fleet.placed(decision, waiting.demand, waiting.keys)
        self._lenders.started(placed, decision, self._fleet.snapshot, self._fleet.rates)
        self._tenants.started(info.tenant, waiting.num_sequences, now)
        self.running[placed] = waiting, now
        self._failing.placed(placed)
        info.num_placed += 1
        outcomes.append(Started(waiting, placed, decision))

    def _account(self, priority: int, cost: int) -> None:
        """Record which classes are overtaken by a start, and how much they are owed."""
        share = self._config.lower_class_share
        for other in sorted(self.queues):
            queue = self.queues[other]
            if other >= priority or is_owed(other, priority, self.queues):
                queue.passed_tokens += cost
            if other > priority:
                queue.owed = max(-float(cost), queue.owed - (1 - share) * cost)
        queue = self.queues[priority]
        lower_wait = min(self._waiting_classes()) < priority
        queue.owed = min(MAX_OWED, queue.owed + share * cost) if lower_wait else 0.0

    # ------------------------------------------------------------------ refusals

    def _consider(self, waiting: QueuedRequest, now: float, outcomes: list[Outcome]) -> None:
        """Check a request that has to wait: whether the queue has a place for it, and whether it can start in time."""
        info = waiting.info
        if info.num_placed == 0 and (loser := self._one_too_many(waiting)) is not None:
            loser_waiting, refusal = loser
            self._refuse(loser_waiting, refusal, outcomes)
            if loser_waiting is waiting:
                return
        if info.due_at == math.inf:
            return
        if not info.streaming:
            waiting.least_ttft_s = self._fleet.least_ttft_s(waiting.demand, waiting.keys) or 0.0
            waiting.stream_s = self.forecast.stream_s(waiting)
        wait_s = self._wait_s(waiting)
        if wait_s > waiting.start_by - now and not info.streaming:
            refusal = refusals.predicted_miss(wait_s, waiting.least_ttft_s, waiting.latest_first_token - now)
            self._refuse(waiting, refusal, outcomes)
        else:
            self._at(waiting.start_by, waiting)

    def _wait_s(self, waiting: QueuedRequest) -> float:
        own = self.queues[waiting.info.priority]
        higher = sum(queue.tokens for priority, queue in self.queues.items() if priority > own.priority)
        return self.forecast.wait_s(waiting, own, higher)

    def _one_too_many(self, newcomer: QueuedRequest) -> tuple[QueuedRequest, Refusal] | None:
        """Return the request to refuse because the newcomer exceeded a bound."""
        info, config = newcomer.info, self._config
        lines = (queue.lines.get(info.tenant) for queue in self.queues.values())
        of_tenant = sum(len(line.requests) for line in lines if line is not None)
        if of_tenant > config.max_queued_per_tenant:
            tenant = info.tenant
        elif self.num_waiting > config.max_queued:
            tenant = None
        else:
            return None
        for priority in sorted(other for other in self._waiting_classes() if other < info.priority):
            if (loser := self.queues[priority].last(tenant)) is not None:
                return loser, refusals.displaced(priority, info.priority, self._retry_after(loser))
        retry_after_s = self._retry_after(newcomer)
        if tenant is None:
            return newcomer, refusals.queue_full(self.num_waiting - 1, retry_after_s)
        return newcomer, refusals.tenant_queue_full(tenant, of_tenant - 1, retry_after_s)

    def _retry_after(self, waiting: QueuedRequest) -> float:
        """Return the predicted seconds until all requests before it have started."""
        return self._wait_s(waiting) or refusals.DEFAULT_RETRY_AFTER_S

    def _misses(self, waiting: QueuedRequest, decision: Decision, now: float, outcomes: list[Outcome]) -> bool:
        """Refuse a request that could start, but whose first token would be late behind queued prompts.

        Where no prompt is queued it starts whatever is predicted, so that rates are learned.
        """
        info, workers = waiting.info, self._fleet.snapshot
        waiting.stream_s = self.forecast.stream_s(waiting)
        if info.streaming or now + decision.predicted_ttft_s <= waiting.latest_first_token:
            return False
        rows = [workers.row_of[name] for name in (decision.decode_id, decision.lender_id) if name]
        if not workers.queued_prefill_tokens[rows].any():
            return False
        left_s = waiting.latest_first_token - now
        refusal = refusals.predicted_miss(0.0, decision.predicted_ttft_s, left_s)
        self._refuse(waiting, refusal, outcomes)
        return True

    def _expire(self, now: float, outcomes: list[Outcome]) -> None:
        while self._times and self._times[0][0] <= now:
            _, _, waiting = heapq.heappop(self._times)
            if waiting is None or not waiting.queued:
                continue
            since, grace_s = waiting.unholdable_since, self._config.no_worker_grace_s
            is_gone = since is not None and is_of_gone_revision(waiting.demand, self._fleet.snapshot)
            if since is not None and is_gone and (not waiting.info.streaming or now >= since + grace_s):
                self._refuse(waiting, refusals.revision_gone(), outcomes)
            elif since is not None and now >= since + grace_s:
                largest = largest_pool(self._fleet.snapshot)
                total = waiting.demand.num_total_blocks
                refusal = refusals.no_worker(total, largest if largest >= 0 else None, grace_s)
                self._refuse(waiting, refusal, outcomes)
            elif now >= waiting.info.deadline:
                self._refuse(waiting, refusals.deadline_passed(), outcomes)
            elif now >= waiting.start_by:
                waited_s = now - waiting.info.arrived_at
                refusal = refusals.too_late(waited_s, waiting.least_ttft_s, self._retry_after(waiting))
                self._refuse(waiting, refusal, outcomes)

    def _refuse(self, waiting: QueuedRequest, refusal: Refusal, outcomes: list[Outcome]) -> None:
        self._remove(waiting)
        self.num_refused[refusal.reason] += 1
        outcomes.append(Refused(waiting, refusal))

    # ------------------------------------------------------------------ accounting

    def _measure_all(self, now: float) -> None:
        """Measure all requests after a change of workers: needed blocks, and whether any worker could hold them."""
        if not self.num_waiting:
            return
        workers = self._fleet.snapshot
        largest = largest_pool(workers)
        known = workers, largest, self._fleet.num_roster_changes
        if self._known is not None and self._known[0] is workers and self._known[1:] == known[1:]:
            return
        self._known = known
        for queue in self.queues.values():
            for waiting in queue:
                self._measure(waiting, now)
            queue.measured_anew()

    def _measure(self, waiting: QueuedRequest, now: float) -> None:
        waiting.measure(self._fleet.snapshot)
        if could_hold(waiting.demand, self._fleet.snapshot):
            waiting.unholdable_since = None
            return
        if waiting.unholdable_since is None:
            waiting.unholdable_since = now
            self._at(now + self._config.no_worker_grace_s, waiting)
        if not waiting.info.streaming and is_of_gone_revision(waiting.demand, self._fleet.snapshot):
            self._at(now, waiting)  # it has no token yet, so another revision serves it as well; a stream waits

    def _remove(self, waiting: QueuedRequest) -> None:
        self.queues[waiting.info.priority].remove(waiting)
        self._forget(waiting)

    def _forget(self, waiting: QueuedRequest) -> None:
        """Remove a request from its queue."""
        waiting.queued = False
        self._reservations.forget(waiting)
        if not self.queues[waiting.info.priority].lines:
            self._tidy()

    def _tidy(self) -> None:
        """Drop empty classes, but keep one while a lower class waits: its debt must survive an empty queue."""
        lowest = min(self._waiting_classes(), default=math.inf)
        empty = [priority for priority, queue in self.queues.items() if not queue.lines]
        for priority in empty:
            if priority < lowest or len(empty) > MAX_EMPTY:
                del self.queues[priority]

    def _waiting_classes(self) -> list[int]:
        return [priority for priority, queue in self.queues.items() if queue.lines]

    def _at(self, when: float, waiting: QueuedRequest | None) -> None:
        """Schedule a look at time `when`."""
        if when < math.inf:
            heapq.heappush(self._times, (when, next(self._numbers), waiting))
