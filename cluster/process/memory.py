"""Memory of long-lived processes: settings of Python's garbage collector, and return of freed memory to the system.

glibc keeps memory that large requests used, in several arenas, and a router's memory would stay at its peak.
"""

import asyncio
import atexit
import ctypes
import gc

ALLOCATED = 1_000
"""New objects, minus freed ones, between two collections of the youngest generation; fewer give shorter pauses."""
COLLECTIONS = 400
"""Collections of the youngest generation before one of all generations, whose pause grows with all live objects."""


def spare_the_started() -> None:
    """Exclude all objects alive now from collections, and make full collections rare.

    Call it when loading is done.

    Reference counting frees nearly all that serving allocates; the rest is mostly gRPC's, five objects per call. With
    the defaults, full collections paused a router for up to 34 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATED, COLLECTIONS, 50)
    atexit.register(gc.unfreeze)  # otherwise C++ bindings such as Triton's report these objects as leaked


TRIM_FROM_BYTES = 8 << 20
"""Freed bytes after which memory is trimmed; trimming takes some milliseconds."""
TRIM_AFTER_S = 2.0
"""Seconds between the first of these bytes and the trim, which is for all that are freed meanwhile."""


class MemoryTrim:
    """Trim after large bodies, on a thread: the call lets go of the GIL."""

    def __init__(self) -> None:
        self._freed = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        self._timer: asyncio.TimerHandle | None = None

    def freed(self, num_bytes: int) -> None:
        """Record bytes of a request that are not needed any more."""
        self._freed += num_bytes
        if self._trim is None or self._timer is not None or self._freed < TRIM_FROM_BYTES:
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(TRIM_AFTER_S, self._begin, loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, self._freed = None, 0
        assert self._trim is not None
        loop.run_in_executor(None, self._trim, 0)
