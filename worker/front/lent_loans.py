"""The loans that a worker's engine gives, as the front ends them when the worker stops or changes its role."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from cluster.errors import TandemError
from cluster.process.life import Drain
from cluster.process.tasks import each_of
from engine.messages.from_engine import CacheChanged, LoadReport
from engine.messages.to_engine import DrainLoans, EndLoans, ToEngine

log = logging.getLogger(__name__)

READABLE_S = 10.0
"""Longest time for which a worker that handed over its streams stays readable, in seconds."""
RETURN_S = 1.0
"""Seconds within which a stream that was handed over is placed again and its loan has arrived."""
END_S = 1.0
"""Seconds for calls that were told to end."""


class Engine(Protocol):
    """Engine that gives the loans: EngineClient has the meaning of its members."""

    @property
    def num_loans(self) -> int: ...
    @property
    def died(self) -> asyncio.Future[TandemError]: ...
    def send(self, message: ToEngine, /) -> object: ...
    def watching(self, watcher: Callable[[CacheChanged | LoadReport], None], /) -> AbstractContextManager[None]: ...


class LentLoans:
    """Loans given, which only the engine knows one by one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def num_loans(self) -> int:
        """Number of open loans, by the engine's last report."""
        return self._engine.num_loans

    def begin(self) -> None:
        """Refuse new loans that compute."""
        self._engine.send(DrainLoans(is_draining=True))

    def resume(self) -> None:
        """Give loans that compute again."""
        self._engine.send(DrainLoans(is_draining=False))

    def end_all(self) -> None:
        """End all loans."""
        self._engine.send(EndLoans())

    async def idle(self, timeout_s: float) -> bool:
        """Wait for a report without loans; return whether none is left by the latest one, or the engine has ended."""
        reported: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def watch(message: CacheChanged | LoadReport) -> None:
            if isinstance(message, LoadReport) and not message.loans and not reported.done():
                reported.set_result(None)

        with self._engine.watching(watch):
            await asyncio.wait((reported, self._engine.died), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return reported.done() or self._engine.died.done() or not self.num_loans


async def empty(requests: Drain, loans: LentLoans, drain_s: float, clock: Callable[[], float] = time.monotonic) -> int:
    """Wait for work in flight of a worker that takes no new work, and hand over the rest after `drain_s`.

    Returns the number of requests handed over.
    """
    give_up_at, handed_over = clock() + drain_s, 0
    finished = await requests.idle(drain_s) and await loans.idle(max(0.0, give_up_at - clock()))
    if not finished:
        handed_over = requests.end_all()
        log.warning("handing over %d requests; %d loans under way", handed_over, loans.num_loans)
        give_up_at, quiet_at = clock() + min(drain_s, READABLE_S), clock() + RETURN_S
        while (now := clock()) < min(give_up_at, quiet_at):  # readable, while the streams' loans arrive and end
            if loans.num_loans or requests.num_calls:
                quiet_at = now + RETURN_S
            await asyncio.sleep(0.02)
        loans.end_all()
    await each_of([requests.idle(END_S), loans.idle(END_S)])
    return handed_over
