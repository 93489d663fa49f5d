"""Merging of several streams into one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing


async def merged(streams: Sequence[AsyncGenerator[bytes]]) -> AsyncGenerator[tuple[int, bytes]]:
    """Yield the items of all streams with the streams' numbers, as they come.

    Raises the first failure; closing it closes all streams. At most one item per stream is buffered.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for message in only:
                yield 0, message
        return
    queue: asyncio.Queue[tuple[int, bytes | BaseException | None]] = asyncio.Queue(len(streams))

    async def feed(number: int, stream: AsyncGenerator[bytes]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(stream):
                async for message in stream:
                    await queue.put((number, message))
        except Exception as error:  # any error, raised below
            end = error
        await queue.put((number, end))

    feeds = [asyncio.ensure_future(feed(number, stream)) for number, stream in enumerate(streams)]
    try:
        num_open = len(feeds)
        while num_open:
            number, said = await queue.get()
            if isinstance(said, BaseException):
                raise said
            if said is None:
                num_open -= 1
            else:
                yield number, said
    finally:
        for task in feeds:
            task.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)
