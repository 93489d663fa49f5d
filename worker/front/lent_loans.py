"""The loans that a worker's engine gives, as the front ends them when the worker stops or changes its role."""

import asyncio

from engine.messages.from_engine import CacheChanged, LoadReport
from engine.messages.to_engine import DrainLoans, EndLoans
from engine.process.front.engine_client import EngineClient


class LentLoans:
    """Loans given, which only the engine knows one by one."""

    def __init__(self, engine: EngineClient) -> None:
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
