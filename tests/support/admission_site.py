"""Admission over a real Fleet whose workers are modelled, in virtual time."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from protos import membership_pb2 as pb
from router.admission.admission import Admission, Outcome, Refused, Started
from router.admission.config import AdmissionConfig
from router.admission.limits.tenant_limits import RateLimiter
from router.admission.refusals import Refusal
from router.admission.request import QueuedRequest, RequestInfo
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import ActivePlacement, WorkerRecord
from router.placement.rates import Priors
from support.tuned import tuned

PRIORS = Priors(1000.0, 100.0, 1e9, 0.001, 0.001, 0.001)
BLOCK = 4


def demand_of(num_blocks: int, num_usable: int = 0) -> Demand:
    """Of so many blocks in all; it costs as many tokens as there is room in them."""
    return Demand(num_blocks * BLOCK, num_usable, num_blocks, BLOCK, 100)


class Site:
    """Decode workers of given pools, all free; events one by one. After each of them the books are checked."""

    def __init__(self, pools: Sequence[int], lenders: int = 0, **config: Any) -> None:
        self.now = 0.0
        self.fleet = Fleet("router", PRIORS)
        self.config = tuned(AdmissionConfig, config)
        self.tenants = RateLimiter(self.config)
        self.admission = Admission(self.fleet, self.config, self.tenants)
        self.workers: dict[str, WorkerRecord] = {}
        self.used: dict[str, int] = {}
        self.started: list[Started] = []
        """In order; who is running is in `running`."""
        self.refused: list[Refused] = []
        self.running: dict[QueuedRequest, ActivePlacement] = {}
        self.waiting: dict[QueuedRequest, None] = {}
        for number, pool in enumerate(pools):
            self.join(f"d{number}", pool)
        for number in range(lenders):
            self.join(f"p{number}", 10_000, pb.ROLE_PREFILL)

    # ------------------------------------------------------------------ events

    def join(self, worker_id: str, pool: int, role: pb.Role.ValueType = pb.ROLE_DECODE) -> None:
        hello = pb.Hello(worker_id=worker_id, role=role, model_fingerprint=b"model")
        self.workers[worker_id] = self.fleet.joined(hello)
        self.report(worker_id, pool)

    def report(self, worker_id: str, available: int, queued_tokens: int = 0, pool: int | None = None) -> None:
        """It has seen all that was placed on it."""
        worker = self.workers[worker_id]
        known = worker.load.num_blocks if worker.load else available
        load = pb.LoadReport(
            available_blocks=available,
            num_blocks=known if pool is None else pool,
            queued_prefill_tokens=queued_tokens,
            placements_seen={"router": 1 << 40},
        )
        self.fleet.reported(worker, load)
        self.changed()

    def leave(self, worker_id: str) -> None:
        self.fleet.left(self.workers.pop(worker_id))
        self.changed()

    def changed(self) -> None:
        self._absorb(self.admission.changed(self.now))

    def ask(
        self,
        num_blocks: int,
        tenant: str = "",
        priority: int = 0,
        usable: int = 0,
        info: RequestInfo | None = None,
        **times: Any,
    ) -> QueuedRequest:
        """`first_token_by` and `deadline` count from now."""
        absolute: dict[str, Any] = {name: self.now + seconds for name, seconds in times.items()}
        info = info or RequestInfo(tenant, priority, self.now, **absolute)
        return self.arrive(info, demand_of(num_blocks, usable), self.keys(usable))

    def arrive(self, info: RequestInfo, demand: Demand, keys: Sequence[bytes] = ()) -> QueuedRequest:
        waiting, outcomes = self.admission.arrived(info, demand, keys, self.now)
        self.waiting[waiting] = None
        self._absorb(outcomes)
        return waiting

    def keys(self, usable: int) -> list[bytes]:
        """Nobody else's."""
        number = next(_KEYS)
        return [f"{number}-{block}".encode() for block in range(usable)]

    def end(self, waiting: QueuedRequest) -> None:
        self._absorb(self.admission.ended(self.running.pop(waiting), self.now))

    def next(self, running: QueuedRequest) -> QueuedRequest:
        """End the only one that runs; return the one that started for it."""
        self.end(running)
        (started,) = self.running
        return started

    def cancel(self, waiting: QueuedRequest) -> None:
        """As the shell: takes back what was placed."""
        if waiting in self.running:
            self.end(waiting)
        elif waiting in self.waiting:
            del self.waiting[waiting]
            self._absorb(self.admission.withdrawn(waiting, self.now))

    def wait(self, seconds: float) -> None:
        """Time passes; the core is called whenever it asked to be."""
        until = self.now + seconds
        while (at := self.admission.next_time()) is not None and at <= until:
            self.now = max(self.now, at)
            self.changed()
        self.now = until

    # ------------------------------------------------------------------ questions

    def is_running(self, waiting: QueuedRequest) -> bool:
        return waiting in self.running

    def refusal(self, waiting: QueuedRequest) -> Refusal | None:
        return next((refused.refusal for refused in self.refused if refused.waiting is waiting), None)

    def refused_for(self, waiting: QueuedRequest) -> Refusal:
        refusal = self.refusal(waiting)
        assert refusal is not None
        return refusal

    def worker_of(self, waiting: QueuedRequest) -> str:
        return self.running[waiting].decode.worker_id

    def _absorb(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            del self.waiting[outcome.waiting]
            if isinstance(outcome, Started):
                self.started.append(outcome)
                self.running[outcome.waiting] = outcome.placed
            else:
                self.refused.append(outcome)
        self.check()

    def check(self) -> None:
        """The invariants that hold after every event."""
        admission = self.admission
        assert admission.num_waiting == len(self.waiting)
        assert admission.num_running == len(self.running)
        fresh = sum(not waiting.info.num_placed for waiting in self.waiting)
        assert fresh <= self.config.max_queued
        assert all(waiting in self.waiting for waiting in admission.reserved_workers().values())
        limit = max(1, int(self.fleet.snapshot.decodes.sum()) // 4)
        assert len(admission.reserved_workers()) <= limit
        for queue in admission.queues.values():
            assert queue.num_waiting == sum(len(line.requests) for line in queue.lines.values())
            assert queue.tokens == sum(waiting.cost for waiting in queue)
            assert not queue.lines or queue.least_need == min(waiting.need for waiting in queue)
            assert set(queue.lines) == {line.tenant for line in queue.first_lines(len(queue.lines) + 1)}
            for line in queue.lines.values():
                assert line.requests == sorted(line.requests, key=lambda waiting: waiting.order)
                assert line.least_need == min(waiting.need for waiting in line.requests)


_KEYS = itertools.count()


# ------------------------------------------------------------------------------------------- a modelled fleet


@dataclass(slots=True)
class Job:
    """A request of a simulation."""

    interactive: bool
    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    info: RequestInfo
    first_token_at: float | None = None
    ended_at: float | None = None
    refused_at: float | None = None
    retry_after_s: float | None = None
    error: str = ""


@dataclass(slots=True)
class _Lender:
    """Computes one prompt after the other, by priority and arrival."""

    worker: WorkerRecord
    tokens_per_s: float
    queue: list[tuple[int, int, int, Callable[[], None]]] = field(default_factory=list)
    current: int = 0
    busy: bool = False

    @property
    def queued_tokens(self) -> int:
        return self.current + sum(tokens for _, _, tokens, _ in self.queue)


class ModelledFleet:
    """Decode workers whose streams take their blocks and a time per token; lenders that compute prompts in turn.

    Every change is reported at once, as by engines that report each step.
    """

    def __init__(
        self, decodes: int, pool: int, lenders: int, lender_tokens_per_s: float, step_s: float, config: AdmissionConfig
    ) -> None:
        self.now = 0.0
        priors = Priors(lender_tokens_per_s, lender_tokens_per_s / 50, 1e9, 0.002, 0.001, 0.0001)
        self.fleet = Fleet("router", priors, learn_rates=False)
        self.admission = Admission(self.fleet, config, RateLimiter(config))
        self.step_s, self.pool = step_s, pool
        self.jobs: list[Job] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._job_of: dict[QueuedRequest, Job] = {}
        self._pending: deque[Outcome] = deque()
        self._performing = False
        self._decodes = [self._join(f"d{number:02}", pb.ROLE_DECODE, pool) for number in range(decodes)]
        joined = [self._join(f"p{number:02}", pb.ROLE_PREFILL, 100_000) for number in range(lenders)]
        self._lenders = {worker: _Lender(worker, lender_tokens_per_s) for worker in joined}
        self._used = dict.fromkeys(self._decodes, 0)
        self._streams = dict.fromkeys(self._decodes, 0)
        self._seen = 0
        for worker in [*self._decodes, *joined]:
            self._report(worker)

    def _join(self, worker_id: str, role: pb.Role.ValueType, pool: int) -> WorkerRecord:
        hello = pb.Hello(
            worker_id=worker_id, role=role, model_fingerprint=b"m", num_blocks=pool, reserve_output_tokens=1024
        )
        return self.fleet.joined(hello)

    def _report(self, worker: WorkerRecord) -> None:
        load = pb.LoadReport(num_blocks=worker.hello.num_blocks, placements_seen={"router": self._seen})
        if worker in self._lenders:
            load.available_blocks = worker.hello.num_blocks
            load.queued_prefill_tokens = self._lenders[worker].queued_tokens
        else:
            load.available_blocks = self.pool - self._used[worker]
            load.running = self._streams[worker]
        self.fleet.reported(worker, load)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def arrive(self, job: Job) -> None:
        """At its time, which must be now."""
        self.jobs.append(job)
        usable = (job.prompt_tokens - 1) // 16
        end = job.prompt_tokens + job.output_tokens
        demand = Demand(job.prompt_tokens, usable, -(-end // 16), 16, 65536, (job.prompt_tokens,), end)
        number = next(self._numbers)
        keys = [number.to_bytes(8, "big") + block.to_bytes(8, "big") for block in range(usable)]
        waiting, outcomes = self.admission.arrived(job.info, demand, keys, self.now)
        self._job_of[waiting] = job
        self._perform(outcomes)

    def run(self, until: float) -> None:
        while True:
            asked = self.admission.next_time()
            event = self._events[0][0] if self._events else None
            times = [at for at in (asked, event) if at is not None]
            if not times or min(times) > until:
                break
            self.now = max(self.now, min(times))
            if event is not None and event <= self.now:
                heapq.heappop(self._events)[2]()
            else:
                self._perform(self.admission.changed(self.now))
        self.now = until

    def _perform(self, outcomes: Sequence[Outcome]) -> None:
        """In order, one after the other, though performing one may bring more: reports must not run ahead."""
        self._pending.extend(outcomes)
        if self._performing:
            return
        self._performing = True
        while self._pending:
            outcome = self._pending.popleft()
            job = self._job_of.pop(outcome.waiting)
            if isinstance(outcome, Started):
                self._begin(job, outcome.placed)
            else:
                job.refused_at = self.now
                job.error = outcome.refusal.reason
                job.retry_after_s = getattr(outcome.refusal.error, "retry_after_s", None)
        self._performing = False

    def _begin(self, job: Job, placed: ActivePlacement) -> None:
        self._seen = placed.sequence
        decode, blocks = placed.decode, placed.demand.num_total_blocks
        self._used[decode] += blocks
        self._streams[decode] += 1
        assert self._used[decode] <= self.pool
        self._report(decode)

        def first_token() -> None:
            job.first_token_at = self.now
            self.fleet.started(placed)
            self.at(self.now + job.output_tokens * self.step_s, end)

        def end() -> None:
            job.ended_at = self.now
            self._used[decode] -= blocks
            self._streams[decode] -= 1
            self._report(decode)
            self._perform(self.admission.ended(placed, self.now))

        if placed.lender is not None and placed.lender_computes:
            lender = self._lenders[placed.lender]
            queued = -job.info.priority, next(self._numbers), placed.lender_tokens, first_token
            heapq.heappush(lender.queue, queued)
            self._next_prompt(lender)
        else:
            self.at(self.now + job.prompt_tokens / 1000, first_token)

    def _next_prompt(self, lender: _Lender) -> None:
        if not lender.busy and lender.queue:
            _, _, tokens, done = heapq.heappop(lender.queue)
            lender.current, lender.busy = tokens, True

            def computed() -> None:
                lender.current, lender.busy = 0, False
                done()
                self._next_prompt(lender)

            self.at(self.now + tokens / lender.tokens_per_s, computed)
        self._report(lender.worker)
        self._perform(self.admission.changed(self.now))
