"""Pace of work beside interactive requests: long work on a thread, and starts of lines."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

SLICE_S = 0.002
"""Seconds of work at a time."""
SHARE = 0.25
"""Share of the time that is worked."""

START_GAP_S = 0.004
"""Seconds between two starts of lines in a router. Lines that start together also end together, and then keep the
event loop busy for a hundred milliseconds."""
PAUSE_PER_LATENESS = 8.0
"""Seconds without a start for each second by which the event loop was late."""

Item = TypeVar("Item")


def paced(
    items: Iterable[Item],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[Item]:
    """Yield the items, with a pause after each slice of the work that they cause.

    Used on a thread: the event loop then waits less for the interpreter's lock.
    """
    began_at = clock()
    for item in items:
        yield item
        worked_s = clock() - began_at
        if worked_s >= SLICE_S:
            sleep(worked_s * (1 / SHARE - 1))
            began_at = clock()


class StartPace:
    """Pace of the starts of a router's lines, slower while its event loop is late: interactive requests wait for it."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """Create the pace; `clock` is that of the event loop by default."""
        self._clock = clock
        self._next_at = 0.0

    async def wait(self) -> None:
        """Wait until the next line may start."""
        clock = self._clock or asyncio.get_running_loop().time
        now = clock()
        at = max(now, self._next_at)
        self._next_at = at + START_GAP_S
        await asyncio.sleep(at - now)
        woke_at = clock()
        self._next_at = max(self._next_at, woke_at + PAUSE_PER_LATENESS * (woke_at - at))
