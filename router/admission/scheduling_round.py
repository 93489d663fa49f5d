"""One class's chance to start something. Pure."""

from dataclasses import dataclass, field

from router.admission.capacity import Capacity
from router.admission.config import AdmissionConfig
from router.admission.lender_load import LenderLoad
from router.admission.queues import ClassQueue, TenantQueue
from router.admission.rate_limiter import RateLimiter
from router.admission.request import QueuedRequest
from router.admission.reservations import Queues, Reservations
from router.placement.fleet import Fleet
from router.placement.rates import Ints

NOTED = 8
"""Of a class without any room: so many tenants at a time, those whose turn is next, count as passed by others."""


@dataclass(frozen=True, slots=True)
class AdmissionParts:
    """What one Admission is made of."""

    config: AdmissionConfig
    fleet: Fleet
    tenants: RateLimiter
    reservations: Reservations
    lenders: LenderLoad


@dataclass(slots=True)
class RoundState:
    """Between two starts."""

    now: float
    refused: Ints
    """[W]: as in Room.of."""
    blocked: list[QueuedRequest] = field(default_factory=list)
    """Those that had their turn and no room."""
    capacities: dict[tuple[float, frozenset[int]], Capacity] = field(default_factory=dict)
    """By what classes share: the share of blocks, and the rows closed to them."""


class SchedulingRound:
    """One class's chance to start something: what it may take of the workers, and who of a line could go."""

    def __init__(
        self,
        parts: AdmissionParts,
        queues: Queues,
        queue: ClassQueue,
        early: bool,
        moment: RoundState,
    ) -> None:
        """`early`: before a class above, being owed."""
        self._parts, self._queue, self._moment = parts, queue, moment
        config = parts.config
        batch = queue.priority < 0
        self._block_share = config.batch_block_share if batch else 1.0
        # Who goes before a class above waits no longer at a lender than that class.
        self.lender_limit_s = config.max_batch_lender_queue_s if batch and not early else config.max_lender_queue_s
        self._closed = parts.reservations.rows_closed_to(queue.priority, queues, parts.fleet.snapshot)
        self._capacity = self._without(self._closed)

    def hopeless(self) -> bool:
        """The least of the class has no room, and nobody has a worker kept for it: nobody need be asked."""
        if self._queue.least_need <= self._capacity.greatest or self._parts.reservations.any_of(self._queue.priority):
            return False
        heads = (line.requests[0] for line in self._queue.first_lines(NOTED))
        self._moment.blocked.extend(head for head in heads if self._ready(head))
        return True

    def capacity_of(self, waiting: QueuedRequest) -> Capacity:
        """With the worker kept for it."""
        row = self._parts.reservations.row_for(waiting, self._parts.fleet.snapshot)
        return self._capacity if row is None else self._without(self._closed - {row})

    def first_of(self, line: TenantQueue) -> QueuedRequest | None:
        """The first of the line that could start now."""
        if not self._parts.tenants.may_start(line.tenant):
            return None
        kept = self._parts.reservations.of_line(line, self._queue.priority)
        if kept is not None and self._ready(kept) and self.capacity_of(kept).fits(kept):
            return kept
        found = None
        if line.least_need <= self._capacity.greatest:
            found = next(
                (waiting for waiting in line.requests if self._ready(waiting) and self._capacity.fits(waiting)), None
            )
        head = line.requests[0]
        if head is not found and self._ready(head) and not self._capacity.fits(head):
            self._moment.blocked.append(head)
        return found

    def _ready(self, waiting: QueuedRequest) -> bool:
        """Nothing but room may keep it waiting."""
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
