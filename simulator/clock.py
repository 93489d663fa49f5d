"""Virtual time: a queue of things to happen, each at its moment, those of one moment in the order they were asked."""

import heapq
from collections.abc import Callable
from typing import Any

Deed = Callable[..., object]


class Appointment:
    """Something that will happen, unless it is cancelled."""

    __slots__ = ("_arguments", "_deed", "at")

    def __init__(self, at: float, deed: Deed, arguments: tuple[Any, ...]) -> None:
        self.at = at
        self._deed: Deed | None = deed
        self._arguments = arguments

    def cancel(self) -> None:
        """It will not happen. Cancelling it again, or when it has happened, does nothing."""
        self._deed = None

    def keep(self) -> None:
        deed, self._deed = self._deed, None
        if deed is not None:
            deed(*self._arguments)


class VirtualClock:
    """Seconds since the start. Time stands still while something happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        """That happened."""
        self._queue: list[tuple[float, int, Appointment]] = []
        self._numbers = 0

    def time(self) -> float:
        """As `time.monotonic`."""
        return self.now

    def at(self, when: float, deed: Deed, *arguments: Any) -> Appointment:
        """Do it then, which is not before now."""
        assert when >= self.now, f"{when} is before {self.now}"
        appointment = Appointment(when, deed, arguments)
        self._numbers += 1
        heapq.heappush(self._queue, (when, self._numbers, appointment))
        return appointment

    def after(self, seconds: float, deed: Deed, *arguments: Any) -> Appointment:
        """Do it so long from now; 0: after what is still to happen in this moment."""
        return self.at(self.now + seconds, deed, *arguments)

    def step(self) -> bool:
        """Let the next thing happen; False when nothing is to."""
        if not self._queue:
            return False
        self.now, _, appointment = heapq.heappop(self._queue)
        self.num_events += 1
        appointment.keep()
        return True
