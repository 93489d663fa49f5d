"""Calls in flight that a draining process still waits for."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Drain:
    """Calls in flight of one kind, and how to end each.

    Used from one event loop.
    """

    def __init__(self) -> None:
        self.draining = False
        """Whether new calls are refused."""
        self.over = False
        """Whether the drain time is over and remaining calls were ended."""
        self._ends: dict[object, Callable[[], object]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_calls(self) -> int:
        return len(self._ends)

    @contextmanager
    def holding(self, end: Callable[[], object]) -> Iterator[None]:
        """Register a call in flight for the duration of the block; `end` as in `hold`."""
        call = self.hold(end)
        try:
            yield
        finally:
            self.release(call)

    def hold(self, end: Callable[[], object]) -> object:
        """Register a call in flight and return its handle, until `release`.

        `end` makes it end soon and is called once at most.
        """
        call = object()
        self._ends[call] = end
        self._idle.clear()
        if self.over:
            end()
        return call

    def release(self, call: object) -> None:
        """Remove the call of a handle: it is over."""
        del self._ends[call]
        if not self._ends:
            self._idle.set()

    def begin(self) -> None:
        self.draining = True

    def resume(self) -> None:
        """Take new calls again; calls still in flight were told to end."""
        self.draining = self.over = False

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no call is in flight.

        Returns False if some call still is after `timeout_s`.
        """
        if not self._ends:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def end_all(self) -> int:
        """End all calls in flight and return their number."""
        self.draining = self.over = True
        ends = list(self._ends.values())
        for end in ends:
            end()
        return len(ends)
