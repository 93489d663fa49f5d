"""How long one will wait, by what was started lately while others waited. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from router.admission.queues import ClassQueue
from router.admission.request import QueuedRequest

HALF_LIFE_S = 20.0
"""Of what was seen, in seconds in which the class waited."""
MIN_BUSY_S = 0.05
"""Less says nothing."""
STREAMS_SEEN = 30
"""Streams of which the mean duration is taken: the last ones count most."""
MAX_CLASSES = 64
"""Remembered; priorities are the clients' own numbers."""


@dataclass(slots=True)
class _Seen:
    """Of one class while it waited; all fade alike."""

    busy_s: float = 0.0
    own_tokens: float = 0.0
    """Started of the class."""
    above_tokens: float = 0.0
    """And of the classes above."""


@dataclass(slots=True)
class WaitForecast:
    """Learns from each event; told of a wrong rate by nobody but the next start."""

    _seen: dict[int, _Seen] = field(default_factory=dict)
    """By class; the one that waited last stands last."""
    _waiting: set[int] = field(default_factory=set)
    """Since the event before."""
    _at: float = 0.0
    _stream_s: float | None = None
    """Of a started request, for each token of output that it was promised blocks for."""
    _promised: float = 0.0
    """Such tokens, the mean."""

    @property
    def anybody_waits(self) -> bool:
        """After the event before."""
        return bool(self._waiting)

    def ended(self, waiting: QueuedRequest, seconds: float) -> None:
        """It ran for so long, well or not."""
        if waiting.num_output_tokens:
            promised = waiting.num_output_tokens
            seen_s = seconds / promised
            if self._stream_s is None:
                self._stream_s, self._promised = seen_s, promised
            self._stream_s += (seen_s - self._stream_s) / STREAMS_SEEN
            self._promised += (promised - self._promised) / STREAMS_SEEN

    def stream_s(self, waiting: QueuedRequest) -> float:
        """Predicted from start to end; 0 while nothing is known. Who may say more than others did is taken to say no
        more than they: `max_tokens` is mostly a bound that nobody reaches."""
        return (self._stream_s or 0.0) * min(waiting.num_output_tokens, self._promised)

    def advance(self, now: float) -> None:
        """Those who waited after the last event have waited until now."""
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
        """These classes wait after this event. Of more than MAX_CLASSES, the first ones are followed."""
        now_waiting = set(list(priorities)[:MAX_CLASSES])
        for priority in now_waiting - self._waiting:
            self._seen[priority] = self._seen.pop(priority, _Seen())
        self._waiting = now_waiting
        for priority in list(self._seen)[: len(self._seen) - MAX_CLASSES]:
            if priority not in now_waiting:
                del self._seen[priority]

    def wait_s(self, waiting: QueuedRequest, own: ClassQueue, higher_tokens: int) -> float:
        """Predicted for one that stands in `own`; 0 where nothing stands before it, or nothing is known.

        As if a start of its own size came this moment: a class that saw no start in a short time may see one yet.
        """
        return self.wait_behind_s(own.priority, tokens_before(waiting, own), higher_tokens, waiting.cost)

    def wait_behind_s(self, priority: int, own_tokens: float, higher_tokens: float, cost: int) -> float:
        """Likewise, behind so many tokens of its class and of those above."""
        seen = self._seen.get(priority)
        if seen is None or seen.busy_s < MIN_BUSY_S or not (own_tokens or higher_tokens):
            return 0.0
        above_s = higher_tokens * seen.busy_s / (seen.above_tokens + cost)
        return above_s + own_tokens * seen.busy_s / (seen.own_tokens + cost)


def tokens_before(waiting: QueuedRequest, own: ClassQueue) -> float:
    """Tokens of its class that start before it: of its own line, and meanwhile of the others as is fair."""
    line = own.lines[waiting.info.tenant]
    mine = line.tokens_before(waiting)
    per_weight = (mine + waiting.cost) / line.weight
    others = (other for other in own.lines.values() if other is not line)
    return mine + sum(min(other.tokens, per_weight * other.weight) for other in others)
