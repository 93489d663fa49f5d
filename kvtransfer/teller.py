"""A thread that tells what is done, so that who reads goes on reading while what came is checked."""

import os
import queue
import threading
from collections.abc import Callable

MAX_UNTOLD = 2
"""Then who reads waits: what came is best checked while the caches have it, and perhaps there is one core for both."""


class Teller:
    """Tells in the order in which it is told. On a machine, or in a cgroup, of one core there is no thread, and all is
    said at once."""

    def __init__(self, name: str) -> None:
        self._untold: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_UNTOLD)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        if len(os.sched_getaffinity(0)) > 1:
            self._thread.start()

    def tell(self, say: Callable[[], None], idle: bool) -> None:
        """Call it soon on the thread. `idle`: this thread has nothing else to do, and calls it now if it is the next.
        From one thread, and not after `finish`."""
        if not self._thread.is_alive() or (idle and self._untold.unfinished_tasks == 0):
            say()
        else:
            self._untold.put(say)

    def finish(self) -> None:
        """All has been told when this returns."""
        if self._thread.is_alive():
            self._untold.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (say := self._untold.get()) is not None:
            say()
            self._untold.task_done()
