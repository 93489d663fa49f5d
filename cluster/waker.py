"""A signal that lets one coroutine sleep until it has work."""

import asyncio


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
