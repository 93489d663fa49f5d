"""Reservations of workers for requests that others have overtaken for too long.

Pure.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.admission.config import AdmissionConfig
from router.admission.queues import ClassQueue, TenantQueue
from router.admission.request import QueuedRequest
from router.admission.workers.capacity import first_to_free
from router.placement.worker_table import WorkerTable

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
