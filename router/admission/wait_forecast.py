"""Forecast of waits, from recent starts while others waited.

Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from router.admission.queues import ClassQueue
from router.admission.request import QueuedRequest

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
