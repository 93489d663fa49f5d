"""Queues of waiting requests: per tenant within priority classes, served by deficit round robin.

Pure.
"""

import bisect
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from router.admission.request import QueuedRequest

QUANTUM = 1024
"""Tokens that a tenant of weight 1 gains with each visit."""

Picker = Callable[["TenantQueue"], QueuedRequest | None]
"""Function that returns the first request of a queue that could start now."""


@dataclass(slots=True, eq=False)
class TenantQueue:
    """Waiting requests of one tenant in one class, in order."""

    tenant: str
    weight: float
    requests: list[QueuedRequest] = field(default_factory=list)
    tokens: int = 0
    deficit: float = 0.0
    """Tokens the tenant may start before others have their turn; below 0 after a request with a reservation."""
    visited: bool = False
    """Whether the queue is first in its class and has gained for that."""
    _least: int | None = None

    @property
    def least_need(self) -> int:
        """Smallest number of blocks that a request needs."""
        if self._least is None:
            self._least = min(waiting.need for waiting in self.requests)
        return self._least

    def add(self, waiting: QueuedRequest) -> None:
        bisect.insort(self.requests, waiting, key=lambda other: other.order)
        self.tokens += waiting.cost
        if self._least is not None:
            self._least = min(self._least, waiting.need)

    def remove(self, waiting: QueuedRequest) -> None:
        at = bisect.bisect_left(self.requests, waiting.order, key=lambda other: other.order)
        assert self.requests[at] is waiting
        del self.requests[at]
        self.tokens -= waiting.cost
        if waiting.need == self._least:
            self._least = None

    def measured_anew(self) -> None:
        self.tokens, self._least = sum(waiting.cost for waiting in self.requests), None

    def tokens_before(self, waiting: QueuedRequest) -> int:
        """Return the tokens of the requests that go before it."""
        at = bisect.bisect_left(self.requests, waiting.order, key=lambda other: other.order)
        return sum(other.cost for other in self.requests[:at])


class ClassQueue:
    """Tenant queues of one priority; the first in the ring has its turn."""

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.lines: dict[str, TenantQueue] = {}
        self.owed = 0.0
        """Tokens that lower classes should have had while this one was served."""
        self.passed_tokens = 0
        """Tokens started past this class's turn since it began to wait."""
        self.num_waiting = 0
        self.tokens = 0
        """Tokens of all waiting requests."""
        self._ring: deque[TenantQueue] = deque()
        self._least: int | None = None

    @property
    def gives_way(self) -> bool:
        """Whether lower classes have their turn; a quantum at a time, not for a few tokens."""
        return self.owed >= QUANTUM

    @property
    def least_need(self) -> int:
        """Smallest number of blocks that a waiting request needs; some request must wait."""
        if self._least is None:
            self._least = min(line.least_need for line in self.lines.values())
        return self._least

    def first_lines(self, count: int) -> list[TenantQueue]:
        """Return the tenant queues whose turn is next."""
        return list(itertools.islice(self._ring, count))

    def __iter__(self) -> Iterator[QueuedRequest]:
        for line in self.lines.values():
            yield from line.requests

    def add(self, waiting: QueuedRequest, weight: float) -> None:
        """Add a request; one that was placed before gets back the cost."""
        tenant = waiting.info.tenant
        if (line := self.lines.get(tenant)) is None:
            line = self.lines[tenant] = TenantQueue(tenant, weight)
            self._ring.append(line)
        line.add(waiting)
        self.num_waiting += 1
        self.tokens += waiting.cost
        if self._least is not None:
            self._least = min(self._least, waiting.need)
        if waiting.info.num_placed:
            line.deficit += waiting.cost

    def remove(self, waiting: QueuedRequest) -> None:
        line = self.lines[waiting.info.tenant]
        line.remove(waiting)
        self.num_waiting -= 1
        self.tokens -= waiting.cost
        if waiting.need == self._least:
            self._least = None
        if not line.requests:
            del self.lines[line.tenant]
            self._ring.remove(line)

    def measured_anew(self) -> None:
        """Update costs and needs, which changed for the same requests."""
        for line in self.lines.values():
            line.measured_anew()
        self.tokens, self._least = sum(line.tokens for line in self.lines.values()), None

    def started(self, waiting: QueuedRequest) -> None:
        """Remove a request that starts, and charge its tenant."""
        self.lines[waiting.info.tenant].deficit -= waiting.cost
        self.remove(waiting)

    def pick(self, first_of: Picker) -> QueuedRequest | None:
        """Return the request whose turn it is among queues that can start something; the other queues gain nothing."""
        able: list[tuple[TenantQueue, QueuedRequest]] = []
        for _ in range(len(self._ring)):
            line = self._ring[0]
            if (waiting := first_of(line)) is not None:
                if self._gains_enough(line, waiting):
                    return waiting
                able.append((line, waiting))
            self._leave(line)
        if not able:
            return None
        # No queue can start in a whole round: skip as many rounds as the next one needs to gain enough.
        rounds = min(math.ceil((waiting.cost - line.deficit) / (QUANTUM * line.weight)) for line, waiting in able)
        for line, _ in able:
            line.deficit += (rounds - 1) * QUANTUM * line.weight
        candidates = dict(able)
        for _ in range(len(self._ring)):
            line = self._ring[0]
            if line in candidates and self._gains_enough(line, candidates[line]):
                return candidates[line]
            self._leave(line)
        raise AssertionError("one of the queues must gain enough")

    def _gains_enough(self, line: TenantQueue, waiting: QueuedRequest) -> bool:
        if not line.visited:
            line.visited = True
            line.deficit += QUANTUM * line.weight
        return waiting.cost <= line.deficit + 1e-6  # rounding of sums of fractions

    def _leave(self, line: TenantQueue) -> None:
        line.visited = False
        self._ring.rotate(-1)

    def last(self, tenant: str | None = None) -> QueuedRequest | None:
        """Return the last request never placed, of `tenant` or of the tenant with most waiting tokens by weight."""
        named = self.lines.values() if tenant is None else filter(None, [self.lines.get(tenant)])
        for line in sorted(named, key=lambda line: -line.tokens / line.weight):
            for waiting in reversed(line.requests):
                if not waiting.info.num_placed:
                    return waiting
        return None
