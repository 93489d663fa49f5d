"""Threads for files and batches: other requests of the router never wait for them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from cluster.fair_turns import FairTurns

QUICK, FAIR, SLOW = 8, 4, 2
"""Threads for the calls of runs, for those of clients, and for work that reads whole files."""

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Threads:
    """Threads of one router."""

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(QUICK, "batches")
        self._fair = ThreadPoolExecutor(FAIR, "batches-clients")
        self._slow = ThreadPoolExecutor(SLOW, "batches-slow")
        self._fair_turns = FairTurns(FAIR, FAIR // 2)
        self._slow_turns = FairTurns(SLOW, SLOW // 2)

    async def quick(self, call: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
        """Make a call that takes milliseconds."""
        return await _on(self._quick, lambda: call(*given, **named))

    async def fair(
        self, tenant: str, call: Callable[Given, Result], *given: Given.args, **named: Given.kwargs
    ) -> Result:
        """Make a call for a client; tenants take turns."""
        async with self._fair_turns.turn(tenant):
            return await _on(self._fair, lambda: call(*given, **named))

    async def slow(
        self, tenant: str, call: Callable[Given, Result], *given: Given.args, **named: Given.kwargs
    ) -> Result:
        """Make a call that may take minutes; tenants take turns."""
        async with self._slow_turns.turn(tenant):
            return await _on(self._slow, lambda: call(*given, **named))

    def close(self) -> None:
        """End the threads when their present calls are over."""
        for pool in (self._quick, self._fair, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)


async def _on(pool: ThreadPoolExecutor, call: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(pool, call)
