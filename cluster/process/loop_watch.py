"""Watch over a process's event loop: how late it is, what holds it up, and a clock that stands still with it.

A process that stood still knows nothing about its peers: their messages wait unread. So silence of peers is measured by
`LoopWatch.time`, which does not count the seconds in which this loop did not run.
"""

import asyncio
import contextlib
import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from weakref import WeakKeyDictionary

from cluster.process.tasks import Tasks

log = logging.getLogger(__name__)

TICK_S = 0.05
"""Seconds between two looks at the loop."""
SPARE_S = 0.05
"""Lateness of a tick in seconds that is not counted as standing still."""
LOGGED_S = 0.25
"""Lateness in seconds from which the stack is logged."""
STACK_FRAMES = 12


class LoopWatch:
    """Watch over one event loop, used on its thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_lag: Callable[[float], object] | None = None
        """Function called with the lag of each tick, in seconds."""
        self.clock = clock
        self._ticked_at = clock()
        self._stood_still_s = 0.0

    def time(self) -> float:
        """Return seconds of a clock that stands still while the loop does."""
        return self.clock() - self._stood_still_s - self._late_s()

    def tick(self) -> float:
        """Record that the loop runs; return its lag in seconds."""
        now = self.clock()
        lag_s = max(0.0, now - self._ticked_at - TICK_S)
        self._stood_still_s += self._late_s()
        self._ticked_at = now
        if self.on_lag is not None:
            self.on_lag(lag_s)
        return lag_s

    def late_s(self) -> float:
        """Return the seconds by which the next tick is late; from any thread."""
        return self.clock() - self._ticked_at - TICK_S

    def _late_s(self) -> float:
        """Return the seconds since the last tick that count as standing still."""
        late_s = self.late_s()
        return late_s if late_s > SPARE_S else 0.0


class _Ticking:
    """Ticks of a watch, and a thread that looks at the loop's stack while it stands still."""

    def __init__(self, watch: LoopWatch) -> None:
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._stack = ""
        self._garbage_began_at = self._garbage_s = 0.0
        self._over = threading.Event()
        gc.callbacks.append(self._collecting)
        self._tasks = Tasks("the event loop is watched no more")  # until the loop ends
        self._tasks.spawn(self._tick())
        threading.Thread(target=self._look, name="loop-watch", daemon=True).start()

    async def _tick(self) -> None:
        used_s = time.process_time()
        with contextlib.closing(self):
            while True:
                await asyncio.sleep(TICK_S)
                lag_s = self._watch.tick()
                used_before_s, used_s = used_s, time.process_time()
                if lag_s >= LOGGED_S:
                    self._report(lag_s, used_s - used_before_s)
                self._stack, self._garbage_s = "", 0.0

    def close(self) -> None:
        del _watches[self._loop]  # the watch would keep its loop
        self._over.set()
        gc.callbacks.remove(self._collecting)

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        """Add up the time of collections of garbage; called by the collector."""
        if phase == "start":
            self._garbage_began_at = time.perf_counter()
        else:
            self._garbage_s += time.perf_counter() - self._garbage_began_at

    def _look(self) -> None:
        while not self._over.wait(TICK_S):
            if not self._stack and self._watch.late_s() >= LOGGED_S / 2:
                self._stack = _stack_of(sys._current_frames().get(self._thread_id))

    def _report(self, lag_s: float, used_s: float) -> None:
        if used_s < lag_s / 2:
            log.warning("the event loop stood still for %.2f s: the process was stopped or had no CPU", lag_s)
            return
        garbage = f", {self._garbage_s:.2f} s of it collecting garbage" if self._garbage_s >= lag_s / 10 else ""
        message = "the event loop stood still for %.2f s, with %.2f s of CPU%s, in:\n%s"
        log.warning(message, lag_s, used_s, garbage, self._stack)


def _stack_of(frame: FrameType | None) -> str:
    return "".join(traceback.format_stack(frame)[-STACK_FRAMES:]) if frame is not None else ""


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[LoopWatch, _Ticking]] = WeakKeyDictionary()


def watch_loop() -> LoopWatch:
    """Return the watch of the running loop, and start it where there is none yet."""
    loop = asyncio.get_running_loop()
    if loop not in _watches:
        watch = LoopWatch()
        _watches[loop] = watch, _Ticking(watch)
    return _watches[loop][0]


def loop_time() -> float:
    """Return seconds of a clock that stands still while the running loop does, where the loop is watched."""
    loop = asyncio.get_running_loop()
    return _watches[loop][0].time() if loop in _watches else loop.time()


def excuse_standstill() -> None:
    """Keep the standstill that the caller has just caused out of the log; the loop's clock leaves it out as usual."""
    loop = asyncio.get_running_loop()
    if loop in _watches:
        _watches[loop][0].tick()
