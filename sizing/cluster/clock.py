"""Virtual time: a queue of events, those of one moment in the order in which they were scheduled."""

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., object]


class ScheduledEvent:
    """A scheduled event, unless it is cancelled."""

    __slots__ = ("_action", "_arguments", "at")

    def __init__(self, at: float, action: Action, arguments: tuple[Any, ...]) -> None:
        self.at = at
        self._action: Action | None = action
        self._arguments = arguments

    def cancel(self) -> None:
        """Cancel the event.

        Cancelling again, or after it happened, does nothing.
        """
        self._action = None

    @property
    def cancelled(self) -> bool:
        return self._action is None

    def keep(self) -> None:
        """Run the event, once."""
        action, self._action = self._action, None
        assert action is not None
        action(*self._arguments)


class VirtualClock:
    """Clock in seconds since the start.

    Time stands still while an event runs.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        """Number of events that happened."""
        self._queue: list[tuple[float, int, int, ScheduledEvent]] = []
        self._numbers = 0

    def time(self) -> float:
        """Return the time, like `time.monotonic`."""
        return self.now

    def at(self, when: float, action: Action, *arguments: Any) -> ScheduledEvent:
        """Schedule an action at a time that is not in the past."""
        return self._put(when, 0, ScheduledEvent(when, action, arguments))

    def after(self, seconds: float, action: Action, *arguments: Any) -> ScheduledEvent:
        """Schedule an action after some seconds; 0: after all pending events of this moment."""
        return self._put(self.now + seconds, 0, ScheduledEvent(self.now + seconds, action, arguments))

    def late(self, when: float, rank: int, action: Action, *arguments: Any) -> ScheduledEvent:
        """Schedule an action at the end of a moment, after all actions of a lower rank, which is above 0.

        So its place does not depend on when it was scheduled.
        """
        assert rank > 0
        return self._put(when, rank, ScheduledEvent(when, action, arguments))

    def step(self) -> bool:
        """Run the next event; return False when there is none."""
        queue = self._queue
        while queue:
            when, _, _, event = heapq.heappop(queue)
            if not event.cancelled:
                self.now = when
                self.num_events += 1
                event.keep()
                return True
        return False

    def _put(self, when: float, rank: int, event: ScheduledEvent) -> ScheduledEvent:
        assert when >= self.now, f"{when} is before {self.now}"
        self._numbers += 1
        heapq.heappush(self._queue, (when, rank, self._numbers, event))
        return event
