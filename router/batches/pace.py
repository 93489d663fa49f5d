"""Pace of long work on a thread, so that the event loop waits less for the interpreter's lock."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

SLICE_S = 0.002
"""Seconds of work at a time."""
SHARE = 0.25
"""Share of the time that is worked."""

Item = TypeVar("Item")


def paced(
    items: Iterable[Item],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[Item]:
    """Yield the items, with a pause after each slice of the work that they cause."""
    began_at = clock()
    for item in items:
        yield item
        worked_s = clock() - began_at
        if worked_s >= SLICE_S:
            sleep(worked_s * (1 / SHARE - 1))
            began_at = clock()
