"""Capacity of workers for a class: what is free, reserved, refused of late, or better bound to a lender later.

Batch must leave a part free. A worker is reserved for a request that others have overtaken for too long. One that
refused for lack of capacity, although it seemed to have it, is left alone for a while.

Pure.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from router.admission.config import AdmissionConfig
from router.admission.queues import ClassQueue, TenantQueue
from router.admission.request import QueuedRequest
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import ActivePlacement, WorkerRecord
from router.placement.place import Decision, startable
from router.placement.rates import Ints, Rates
from router.placement.worker_table import WorkerTable


@dataclass(frozen=True, slots=True, eq=False)
class Capacity:
    """Blocks of each worker that one class may use now."""

    workers: WorkerTable
    available: Ints
    """Available blocks, [W]; -1 where the class may start nothing."""
    greatest: int
    """Largest number of available blocks of any decode worker; a request with a greater `need` cannot start."""
    pool: int | None
    """Pool size of all decode workers where pools and reservations are equal; `greatest` and it then decide alone."""

    @classmethod
    def of(
        cls, workers: WorkerTable, kept_rows: Collection[int], refused: Ints, batch_block_share: float
    ) -> "Capacity":
        """Compute the capacity.

        `kept_rows` are workers reserved for others.

        `refused` [W]: the smallest number of blocks that each worker has just refused.
        """
        available = np.minimum(workers.available_blocks, refused - 1)
        if batch_block_share < 1:
            headroom = np.ceil((1 - batch_block_share) * workers.num_blocks).astype(np.int64)
            empty = available >= workers.num_blocks
            available = np.where(empty, available, np.maximum(-1, available - headroom))
        available[list(kept_rows)] = -1
        starts = workers.starts
        pools = workers.num_blocks[starts]
        equal = len(workers.reserves) == 1 and bool(len(pools)) and int(pools.min()) == int(pools.max())
        equal = equal and not workers.with_canaries
        return cls(
            workers=workers,
            available=available,
            greatest=int(available[starts].max(initial=-1)),
            pool=int(pools[0]) if equal else None,
        )

    def fits(self, waiting: QueuedRequest) -> bool:
        """Return whether a request could start somewhere now."""
        demand = waiting.demand
        if not (demand.embeds or demand.only):
            if waiting.need > self.greatest:
                return False
            if self.pool is not None and self.workers.suit(demand):
                return demand.num_total_blocks <= self.pool
        return bool(startable(demand, self.workers, self.available).any())


def could_hold(demand: Demand, workers: WorkerTable) -> bool:
    """Return whether the pool of any worker that could serve the request is large enough for all of it."""
    able = workers.able_for(demand, workers.starts_for(demand))
    return demand.num_total_blocks <= int(workers.num_blocks[able].max(initial=-1))


def is_of_gone_revision(demand: Demand, workers: WorkerTable) -> bool:
    """Return whether a request that no worker could hold could be held if it were of another revision or adapter."""
    if not (demand.files or demand.revision or demand.adapter):
        return False
    return could_hold(replace(demand, files="", revision="", adapter=""), workers)


def largest_pool(workers: WorkerTable) -> int:
    """Return the largest pool of a decode worker, or -1 without one."""
    return int(workers.num_blocks[workers.starts].max(initial=-1))


def first_to_free(demand: Demand, workers: WorkerTable, batch_block_share: float, kept: Collection[int]) -> int | None:
    """Return the row of the worker predicted to have capacity first if no other request starts there.

    Rows in `kept` are excluded. Requests end in no known order, so each worker is assumed to free an equal share of its
    used blocks per second: the smallest share that must be freed wins. None where no worker's pool could hold the
    request.
    """
    promised = np.array([demand.num_blocks_to_reserve(reserve) for reserve in workers.reserves], np.int64)
    if not len(promised):
        return None
    pools = workers.num_blocks
    headroom = np.ceil((1 - batch_block_share) * pools).astype(np.int64)
    needed = np.minimum(promised[workers.reserve_of] + headroom, pools)
    could = workers.able_for(demand, workers.starts_for(demand) & (pools >= demand.num_total_blocks))
    able = could.copy()
    able[list(kept)] = False
    able = workers.in_share(able, could, demand.traffic_hash)
    if not able.any():
        return None
    missing = np.maximum(0, needed - workers.available_blocks)
    part = missing / np.maximum(1, pools - workers.available_blocks)
    return int(np.where(able, part, np.inf).argmin())


Queues = Mapping[int, ClassQueue]


@dataclass(slots=True, eq=False)
class Reservation:
    """A worker on which no other request starts until `waiting` has started somewhere."""

    waiting: QueuedRequest
    worker_id: str


class Reservations:
    """Overtaken requests and reservations, of waiting requests only."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self.kept: list[Reservation] = []
        self._passed: dict[QueuedRequest, None] = {}

    def passed(self, waiting: QueuedRequest, now: float, queue: ClassQueue) -> None:
        """Record that `waiting` was skipped for lack of capacity while a later request started."""
        if waiting.passed_at is None:
            waiting.passed_at, waiting.passed_mark = now, queue.passed_tokens
            self._passed[waiting] = None

    def forget(self, waiting: QueuedRequest) -> None:
        """Forget a request that waits no more."""
        self._passed.pop(waiting, None)
        self.kept = [kept for kept in self.kept if kept.waiting is not waiting]

    def arrange(self, queues: Queues, workers: WorkerTable, now: float, may_start: Callable[[str, int], bool]) -> None:
        """Reserve workers for requests overtaken too long, highest class first, and drop useless reservations."""
        self.kept = [kept for kept in self.kept if self._serves(kept, workers, may_start)]
        due = [waiting for waiting in self._passed if self._is_due(waiting, queues, now, may_start)]
        if not due:
            return
        limit = max(1, int(workers.starts.sum()) // 4)
        due.sort(key=lambda waiting: (-waiting.info.priority, waiting.passed_at, waiting.number))
        for waiting in due:
            if len(self.kept) >= limit:
                lowest = min(self.kept, key=lambda kept: kept.waiting.info.priority)
                if lowest.waiting.info.priority >= waiting.info.priority:
                    return
                self.kept.remove(lowest)
            rows = [workers.row_of[kept.worker_id] for kept in self.kept]
            share = self._config.batch_block_share if waiting.info.priority < 0 else 1.0
            row = first_to_free(waiting.demand, workers, share, rows)
            if row is not None:
                self.kept.append(Reservation(waiting, workers.ids[row]))

    def _serves(self, kept: Reservation, workers: WorkerTable, may_start: Callable[[str, int], bool]) -> bool:
        row = workers.row_of.get(kept.worker_id)
        joined = row is not None and bool(workers.starts_for(kept.waiting.demand)[row])
        large = joined and int(workers.num_blocks[row]) >= kept.waiting.demand.num_total_blocks
        return large and may_start(kept.waiting.info.tenant, kept.waiting.num_sequences)

    def _is_due(
        self, waiting: QueuedRequest, queues: Queues, now: float, may_start: Callable[[str, int], bool]
    ) -> bool:
        assert waiting.passed_at is not None
        passed_tokens = queues[waiting.info.priority].passed_tokens - waiting.passed_mark
        long = now - waiting.passed_at >= self._config.max_passed_s or passed_tokens >= self._config.max_passed_tokens
        free = waiting.unholdable_since is None and may_start(waiting.info.tenant, waiting.num_sequences)
        return long and free and all(kept.waiting is not waiting for kept in self.kept)

    def rows_closed_to(self, priority: int, queues: Queues, workers: WorkerTable) -> frozenset[int]:
        """Return the workers reserved for others; a class above the reservation's avoids them only if that is owed."""
        return frozenset(
            workers.row_of[kept.worker_id]
            for kept in self.kept
            if kept.waiting.info.priority >= priority or is_owed(kept.waiting.info.priority, priority, queues)
        )

    def row_for(self, waiting: QueuedRequest, workers: WorkerTable) -> int | None:
        """Return the row of the worker reserved for the request, or None."""
        return next((workers.row_of[kept.worker_id] for kept in self.kept if kept.waiting is waiting), None)

    def any_of(self, priority: int) -> bool:
        """Return whether a request of that class has a reservation."""
        return any(kept.waiting.info.priority == priority for kept in self.kept)

    def of_line(self, line: TenantQueue, priority: int) -> QueuedRequest | None:
        """Return the first request of a queue with a reservation, or None."""
        for kept in self.kept:
            info = kept.waiting.info
            if info.tenant == line.tenant and info.priority == priority:
                return kept.waiting
        return None


def is_owed(lower: int, higher: int, queues: Queues) -> bool:
    """Return whether a class above `lower`, up to `higher`, was served so much that lower ones have their turn."""
    return any(queue.gives_way for priority, queue in queues.items() if lower < priority <= higher)


FADES_S = 0.1
"""Seconds without a report after which a refusal is forgotten."""
_NONE = np.iinfo(np.int64).max
"""Refused blocks of a worker that refused nothing."""


@dataclass(frozen=True, slots=True)
class _Backoff:
    num_blocks: int
    num_reports: int
    """Number of the worker's last load report when it refused; a newer report clears the backoff."""
    until: float


class CapacityBackoff:
    """Latest refusal of each worker."""

    def __init__(self) -> None:
        self.refusals: dict[WorkerRecord, _Backoff] = {}

    def add(self, worker: WorkerRecord, num_blocks: int, now: float) -> float:
        """Record that the worker refused `num_blocks`; return when this is forgotten."""
        self.refusals[worker] = _Backoff(num_blocks, worker.num_reports, now + FADES_S)
        return now + FADES_S

    def column(self, fleet: Fleet, now: float) -> Ints:
        """Return, for each worker of the snapshot, the number of blocks it refused, or more than any pool: [W]."""
        workers = fleet.snapshot
        column = np.full(len(workers.ids), _NONE)
        for worker, rebuff in list(self.refusals.items()):
            joined = fleet.worker(worker.worker_id) is worker and worker.worker_id in workers.row_of
            if not joined or worker.num_reports != rebuff.num_reports or now >= rebuff.until:
                del self.refusals[worker]
            else:
                column[workers.row_of[worker.worker_id]] = rebuff.num_blocks
        return column


class LenderLoad:
    """Load of lenders, with long prompts on a part of them, so that short ones find others free.

    A lender computes prompts in order of priority and arrival: a later prompt of the same class waits for all that is
    queued there.
    """

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._long: dict[ActivePlacement, str] = {}
        """Lenders of the long prompts in progress."""

    def queue_s(self, worker_id: str, workers: WorkerTable, rates: Rates) -> float:
        """Return the predicted seconds until a lender's queue is computed; 0 for one that is gone."""
        row = workers.row_of.get(worker_id)
        return 0.0 if row is None else float(workers.queued_prefill_tokens[row] / rates.prefill_tokens_per_s[row])

    def deep(self, decision: Decision, workers: WorkerTable, rates: Rates, limit_s: float) -> bool:
        """Return whether the decision's lender is busy beyond the limit."""
        if not decision.lender_computes or decision.lender_id is None:
            return False
        return self.queue_s(decision.lender_id, workers, rates) > limit_s

    def crowded(self, decision: Decision, workers: WorkerTable, rates: Rates) -> bool:
        """Return whether the prompt is long and as many lenders as allowed compute long prompts."""
        if not self._is_long(decision, workers, rates):
            return False
        busy = {lender_id for placed, lender_id in self._long.items() if not placed.started}
        return decision.lender_id not in busy and len(busy) >= self._allowed(int((~workers.decodes).sum()))

    def _allowed(self, num_lenders: int) -> int:
        """Return the number of lenders that may compute long prompts at a time.

        A small fleet needs more than a fraction of one lender for short prompts: of four lenders, with three for long
        prompts, half as many requests were in time.
        """
        config = self._config
        left = min(config.short_prompt_lenders, -(-num_lenders // 2))
        return max(1, min(int(config.long_prompt_lender_share * num_lenders), num_lenders - left))

    def started(self, placed: ActivePlacement, decision: Decision, workers: WorkerTable, rates: Rates) -> None:
        if decision.lender_id is not None and self._is_long(decision, workers, rates):
            self._long[placed] = decision.lender_id

    def ended(self, placed: ActivePlacement) -> None:
        self._long.pop(placed, None)

    def _is_long(self, decision: Decision, workers: WorkerTable, rates: Rates) -> bool:
        if not decision.lender_computes or decision.lender_id is None:
            return False
        tokens_per_s = float(rates.prefill_tokens_per_s[workers.row_of[decision.lender_id]])
        return decision.lender_tokens / tokens_per_s > self._config.long_prompt_s
