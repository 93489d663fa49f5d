"""An event loop whose time passes only while nobody has anything to do, and then at once; turns of any loop.

Every asynchronous unit test runs on one (`tests/unit/conftest.py`).
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_at_work = 0
        """Number of calls in other threads; while there are any, time stands still."""

    def select(self, timeout: float | None = None) -> Any:
        if self.num_at_work and timeout != 0:
            return super().select()
        assert timeout is not None, "everybody waits for ever"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Without sockets, and with no threads but those of `run_in_executor`."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future: asyncio.Future[Any] = super().run_in_executor(executor, func, *args)
        self._virtual.num_at_work += 1
        future.add_done_callback(self._is_back)
        return future

    def _is_back(self, _: object) -> None:
        self._virtual.num_at_work -= 1

    async def shutdown_default_executor(self, *arguments: Any) -> None:
        self._virtual.num_at_work += 1  # a thread waits for the others
        await super().shutdown_default_executor(*arguments)
        self._virtual.num_at_work -= 1


def run_virtually(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)


async def settle() -> None:
    """Turns enough of the loop for whatever follows from what was done, where nobody waits for time or sockets."""
    for _ in range(30):
        await asyncio.sleep(0)
