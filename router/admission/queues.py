"""Queues of waiting requests: per tenant within priority classes, served by deficit round robin.

Forecast of waits, from recent starts while others waited.

Pure.
"""

import bisect
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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


HALF_LIFE_S = 20.0
"""Half-life of observations, in seconds during which the class waited."""
MIN_BUSY_S = 0.05
"""Shortest observation that is used, in seconds."""
STREAMS_SEEN = 30
"""Streams over which the mean duration is taken, recent ones weighing most."""
MAX_CLASSES = 64
"""Classes that are remembered; clients choose priorities freely."""


@dataclass(slots=True)
class _Seen:
    """Observations of one class while it waited; all fade alike."""

    busy_s: float = 0.0
    own_tokens: float = 0.0
    """Tokens started of the class."""
    above_tokens: float = 0.0
    """Tokens started of higher classes."""


@dataclass(slots=True)
class WaitForecast:
    """Forecast that learns from each event; a wrong rate is corrected by the next start."""

    _seen: dict[int, _Seen] = field(default_factory=dict)
    """Observations by class, most recently waiting last."""
    _waiting: set[int] = field(default_factory=set)
    """Classes that wait since the last event."""
    _at: float = 0.0
    _stream_s: float | None = None
    """Seconds of a started request per output token for which it reserved blocks."""
    _promised: float = 0.0
    """Mean number of such tokens."""

    @property
    def anybody_waits(self) -> bool:
        """Whether any class waits after the last event."""
        return bool(self._waiting)

    def ended(self, waiting: QueuedRequest, seconds: float) -> None:
        """Learn from a request that ran for `seconds`, with success or not."""
        if waiting.num_output_tokens:
            promised = waiting.num_output_tokens
            seen_s = seconds / promised
            if self._stream_s is None:
                self._stream_s, self._promised = seen_s, promised
            self._stream_s += (seen_s - self._stream_s) / STREAMS_SEEN
            self._promised += (promised - self._promised) / STREAMS_SEEN

    def stream_s(self, waiting: QueuedRequest) -> float:
        """Return the predicted seconds from start to end; 0 while nothing is known.

        A request that may generate more than others did is assumed to generate as much as they: `max_tokens` is mostly
        a bound that no request reaches.
        """
        return (self._stream_s or 0.0) * min(waiting.num_output_tokens, self._promised)

    def advance(self, now: float) -> None:
        """Account the time since the last event to the classes that waited."""
        passed_s, self._at = max(0.0, now - self._at), max(now, self._at)
        fading = 0.5 ** (passed_s / HALF_LIFE_S)
        for priority in self._waiting:
            seen = self._seen[priority]
            seen.busy_s = (seen.busy_s + passed_s) * fading
            seen.own_tokens *= fading
            seen.above_tokens *= fading

    def started(self, priority: int, tokens: int) -> None:
        for waiting in self._waiting:
            if waiting <= priority:
                self._seen[waiting].above_tokens += tokens
                if waiting == priority:
                    self._seen[waiting].own_tokens += tokens

    def waiting(self, priorities: Iterable[int]) -> None:
        """Set the classes that wait after this event; of more than MAX_CLASSES, the first ones."""
        now_waiting = set(list(priorities)[:MAX_CLASSES])
        for priority in now_waiting - self._waiting:
            self._seen[priority] = self._seen.pop(priority, _Seen())
        self._waiting = now_waiting
        for priority in list(self._seen)[: len(self._seen) - MAX_CLASSES]:
            if priority not in now_waiting:
                del self._seen[priority]

    def wait_s(self, waiting: QueuedRequest, own: ClassQueue, higher_tokens: int) -> float:
        """Return the predicted wait of a request in `own`; 0 where nothing is before it, or nothing is known.

        Assumes a start of its own size this moment: a class that saw no start in a short time may see one yet.
        """
        return self.wait_behind_s(own.priority, tokens_before(waiting, own), higher_tokens, waiting.cost)

    def wait_behind_s(self, priority: int, own_tokens: float, higher_tokens: float, cost: int) -> float:
        """Return the predicted wait behind so many tokens of its class and of higher ones."""
        seen = self._seen.get(priority)
        if seen is None or seen.busy_s < MIN_BUSY_S or not (own_tokens or higher_tokens):
            return 0.0
        above_s = higher_tokens * seen.busy_s / (seen.above_tokens + cost)
        return above_s + own_tokens * seen.busy_s / (seen.own_tokens + cost)


def tokens_before(waiting: QueuedRequest, own: ClassQueue) -> float:
    """Return the tokens of its class that start before it: of its own queue, and a fair share of the others."""
    line = own.lines[waiting.info.tenant]
    mine = line.tokens_before(waiting)
    per_weight = (mine + waiting.cost) / line.weight
    others = (other for other in own.lines.values() if other is not line)
    return mine + sum(min(other.tokens, per_weight * other.weight) for other in others)
