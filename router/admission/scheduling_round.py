"""Scheduling round: one attempt of a class to start a request.

Pure.
"""

from dataclasses import dataclass, field

from router.admission.config import AdmissionConfig
from router.admission.limits.tenant_limits import RateLimiter
from router.admission.queues import ClassQueue, TenantQueue
from router.admission.request import QueuedRequest
from router.admission.workers.capacity import Capacity, LenderLoad, Queues, Reservations
from router.placement.fleet.fleet import Fleet
from router.placement.rates import Ints

BATCH_LENDER_QUEUE_S = 0.5
"""Seconds of predicted work beyond which a lender gets no further request of a class below 0. It is below the default
of `max_lender_queue_s`, so that a request of a higher class finds a short queue."""
NOTED = 8
"""Tenants of a class without any capacity, next in turn, that count as overtaken in one round."""


@dataclass(frozen=True, slots=True)
class AdmissionParts:
    """Parts of an Admission."""

    config: AdmissionConfig
    fleet: Fleet
    tenants: RateLimiter
    reservations: Reservations
    lenders: LenderLoad


@dataclass(slots=True)
class RoundState:
    """State between two starts."""

    now: float
    refused: Ints
    """Refused blocks, [W], as in Capacity.of."""
    blocked: list[QueuedRequest] = field(default_factory=list)
    """Requests skipped for lack of capacity."""
    capacities: dict[tuple[float, frozenset[int]], Capacity] = field(default_factory=dict)
    """Capacities by what classes share: the share of blocks, and the rows closed to them."""


class SchedulingRound:
    """One class's attempt: the capacity it may use, and the request of each queue that could start."""

    def __init__(
        self,
        parts: AdmissionParts,
        queues: Queues,
        queue: ClassQueue,
        early: bool,
        moment: RoundState,
    ) -> None:
        """Begin a round; `early`: the class goes before a higher one that owes it."""
        self._parts, self._queue, self._moment = parts, queue, moment
        config = parts.config
        batch = queue.priority < 0
        self._block_share = config.batch_block_share if batch else 1.0
        # A class that overtakes a higher one waits no longer at a lender than that class.
        self.lender_limit_s = BATCH_LENDER_QUEUE_S if batch and not early else config.max_lender_queue_s
        self._closed = parts.reservations.rows_closed_to(queue.priority, queues, parts.fleet.snapshot)
        self._capacity = self._without(self._closed)

    def hopeless(self) -> bool:
        """Return whether the smallest request of the class has no capacity and none has a reservation."""
        if self._queue.least_need <= self._capacity.greatest or self._parts.reservations.any_of(self._queue.priority):
            return False
        heads = (line.requests[0] for line in self._queue.first_lines(NOTED))
        self._moment.blocked.extend(head for head in heads if self._ready(head))
        return True

    def capacity_of(self, waiting: QueuedRequest) -> Capacity:
        """Return the capacity for a request, its reserved worker included."""
        row = self._parts.reservations.row_for(waiting, self._parts.fleet.snapshot)
        return self._capacity if row is None else self._without(self._closed - {row})

    def first_of(self, line: TenantQueue) -> QueuedRequest | None:
        """Return the first request of the queue that could start now.

        A request that waits for its tenant's max_running makes the tenant's later requests wait, too.
        """
        if not self._parts.tenants.may_start(line.tenant, 1):
            return None
        kept = self._parts.reservations.of_line(line, self._queue.priority)
        if kept is not None and self._ready(kept) and self.capacity_of(kept).fits(kept):
            return kept if self._may_start(kept) else None
        first = None
        if line.least_need <= self._capacity.greatest:
            first = next(
                (waiting for waiting in line.requests if self._ready(waiting) and self._capacity.fits(waiting)), None
            )
        head = line.requests[0]
        if head is not first and self._ready(head) and not self._capacity.fits(head):
            self._moment.blocked.append(head)
        return first if first is not None and self._may_start(first) else None

    def _may_start(self, waiting: QueuedRequest) -> bool:
        return self._parts.tenants.may_start(waiting.info.tenant, waiting.num_sequences)

    def _ready(self, waiting: QueuedRequest) -> bool:
        """Return whether only capacity may keep the request waiting."""
        if waiting.info.not_before > self._moment.now or waiting.unholdable_since is not None:
            return False
        if waiting.held_until <= self._moment.now:
            return True
        if waiting.held_by is None:
            return False
        return (
            self._parts.lenders.queue_s(waiting.held_by, self._parts.fleet.snapshot, self._parts.fleet.rates)
            <= self.lender_limit_s
        )

    def _without(self, rows: frozenset[int]) -> Capacity:
        key = self._block_share, rows
        if (capacity := self._moment.capacities.get(key)) is None:
            capacity = self._moment.capacities[key] = Capacity.of(
                self._parts.fleet.snapshot, rows, self._moment.refused, self._block_share
            )
        return capacity
