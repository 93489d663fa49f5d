"""Lets one coroutine sleep until there is something for it to look at."""

import asyncio


class Waker:
    """For one sleeper. A call that finds nobody asleep is forgotten: look for what there is before you sleep."""

    __slots__ = ("_sleep",)

    def __init__(self) -> None:
        self._sleep: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._sleep is not None and not self._sleep.done():
            self._sleep.set_result(None)

    async def sleep(self) -> None:
        self._sleep = asyncio.get_running_loop().create_future()
        await self._sleep
