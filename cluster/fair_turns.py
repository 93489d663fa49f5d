"""Turns at work that takes long, shared fairly among tenants; turns at work that holds an event loop up.

A signal that lets one coroutine sleep until it has work.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairTurns:
    """Turns for at most `slots` tasks at a time, and `slots_per_tenant` of one tenant.

    Tenants that wait take turns; within a tenant the first to come is the first to be served. How many may wait is
    bounded by the caller. Used from one event loop.
    """

    def __init__(self, slots: int, slots_per_tenant: int) -> None:
        assert 0 < slots_per_tenant <= slots
        self._slots = slots
        self._slots_per_tenant = slots_per_tenant
        self._working: Counter[str] = Counter()
        """Turns being taken, by tenant."""
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting tasks by tenant; the tenant that was served longest ago comes first."""

    @property
    def num_working(self) -> int:
        return self._working.total()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn of this tenant, and take it within the block."""
        await self._begin(tenant)
        try:
            yield
        finally:
            self._end(tenant)

    async def _begin(self, tenant: str) -> None:
        if tenant not in self._waiting and self._may_work(tenant):
            self._working[tenant] += 1
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._end(tenant)  # the turn came in the same moment
            else:
                self._forget(tenant, future)
            raise

    def _end(self, tenant: str) -> None:
        self._working[tenant] -= 1
        if not self._working[tenant]:
            del self._working[tenant]
        self._start_waiting()

    def _forget(self, tenant: str, future: "asyncio.Future[None]") -> None:
        waiting = self._waiting.get(tenant)
        if waiting is not None and future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._waiting[tenant]

    def _start_waiting(self) -> None:
        while (tenant := next(filter(self._may_work, self._waiting), None)) is not None:
            future = self._waiting[tenant].popleft()
            self._waiting.move_to_end(tenant)
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not future.done():  # a cancelled task has not run yet since
                self._working[tenant] += 1
                future.set_result(None)

    def _may_work(self, tenant: str) -> bool:
        return self.num_working < self._slots and self._working[tenant] < self._slots_per_tenant


class LoopTurns:
    """Turns at work that holds an event loop up: `at_once` tasks work between two looks of the loop at its sockets.

    A burst of arrivals would otherwise be worked off before anything is sent or read, streams of others included. The
    first to come is the first to be served. Used from one event loop.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Return when this task may work; it waits only where others worked in this turn of the loop."""
        loop = asyncio.get_running_loop()
        if self._left == self._at_once:
            loop.call_soon(self._refill)
        if self._left and not self._waiting:
            self._left -= 1
            return
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append(future)
        await future

    def _refill(self) -> None:
        """Begin another turn of the loop: those that waited longest work in it."""
        self._left = self._at_once
        while self._waiting and self._left:
            future = self._waiting.popleft()
            if not future.done():  # else its task was cancelled
                future.set_result(None)
                self._left -= 1
        if self._left < self._at_once:
            asyncio.get_running_loop().call_soon(self._refill)


class Waker:
    """Signal for one sleeper.

    `wake` without a sleeper is lost, so check for work before `sleep`.
    """

    __slots__ = ("_sleep",)

    def __init__(self) -> None:
        self._sleep: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._sleep is not None and not self._sleep.done():
            self._sleep.set_result(None)

    async def sleep(self) -> None:
        self._sleep = asyncio.get_running_loop().create_future()
        await self._sleep
