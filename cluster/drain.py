"""What a process that was told to stop still waits for."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Drain:
    """Calls under way of one kind, and how to end each when the time is over. Used from one event loop."""

    def __init__(self) -> None:
        self.draining = False
        """No new call is taken."""
        self.over = False
        """Nor goes an old one on."""
        self._ends: dict[object, Callable[[], object]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_calls(self) -> int:
        return len(self._ends)

    @contextmanager
    def holding(self, end: Callable[[], object]) -> Iterator[None]:
        """A call is under way within the block; `end` makes it end soon, and is called once at most."""
        call = object()
        self._ends[call] = end
        self._idle.clear()
        if self.over:
            end()
        try:
            yield
        finally:
            del self._ends[call]
            if not self._ends:
                self._idle.set()

    def begin(self) -> None:
        self.draining = True

    def resume(self) -> None:
        """New calls are taken again; whatever is still under way was told to end."""
        self.draining = self.over = False

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no call is under way; False when some still is after `timeout_s`."""
        if not self._ends:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def end_all(self) -> int:
        """End what is under way; how many there were."""
        self.draining = self.over = True
        ends = list(self._ends.values())
        for end in ends:
            end()
        return len(ends)
