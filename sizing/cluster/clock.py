"""Virtual time: a queue of events, those of one moment in the order in which they were scheduled.

The clock is an event loop too. Tasks that an event woke run before the next event, at the same moment.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

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
        """Run the event, once, unless it is cancelled."""
        action, self._action = self._action, None
        if action is not None:
            action(*self._arguments)


class VirtualClock:
    """Clock in seconds since the start, and the loop of the tasks that live by it.

    Time stands still while an event runs.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        """Number of events that happened."""
        self._queue: list[tuple[float, int, int, ScheduledEvent]] = []
        self._numbers = 0
        self._ready: deque[ScheduledEvent] = deque()
        """Steps of tasks that can run now."""
        self._loop = cast(asyncio.AbstractEventLoop, self)

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
        """Run the next event, and what it woke; return False when there is none."""
        until = self.num_events + 1
        return self.run(lambda: self.num_events < until)

    def run(self, is_needed: Callable[[], object]) -> bool:
        """Run events while something is needed; return False when there are none before."""
        outer, queue, ready = asyncio._get_running_loop(), self._queue, self._ready
        asyncio._set_running_loop(self._loop)
        try:
            while is_needed():
                while ready:
                    ready.popleft().keep()
                if not queue:
                    return False
                when, _, _, event = heapq.heappop(queue)
                if not event.cancelled:
                    self.now = when
                    self.num_events += 1
                    event.keep()
                    while ready:
                        ready.popleft().keep()
            return True
        finally:
            asyncio._set_running_loop(outer)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine from now on; what it raises ends the step of the clock in which it does."""
        self.create_task(work).add_done_callback(lambda task: task.result())

    def _put(self, when: float, rank: int, event: ScheduledEvent) -> ScheduledEvent:
        assert when >= self.now, f"{when} is before {self.now}"
        self._numbers += 1
        heapq.heappush(self._queue, (when, rank, self._numbers, event))
        return event

    # ------------------------------------------------------------------ what asyncio asks of an event loop

    def call_soon(self, callback: Action, *args: Any, context: Any = None) -> Any:
        run = (callback, args) if context is None else (context.run, (callback, *args))
        event = ScheduledEvent(self.now, *run)
        self._ready.append(event)
        return event

    def call_later(self, delay: float, callback: Action, *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Action, *args: Any, context: Any = None) -> Any:
        return self.at(when, callback, *args) if context is None else self.at(when, context.run, callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._loop)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self._loop, **options)

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise context.get("exception") or RuntimeError(context["message"])
