"""Merging of several streams into one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing


async def merged(
    streams: Sequence[AsyncGenerator[Sequence[bytes]]], max_open: int | None = None
) -> AsyncGenerator[tuple[int, Sequence[bytes]]]:
    """Yield the items of all streams with the streams' numbers, as they come.

    At most `max_open` streams are open at a time, in order; None: all. Raises the first failure; closing it closes all
    streams. At most one item per stream is buffered.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for messages in only:
                yield 0, messages
        return
    queue: asyncio.Queue[tuple[int, Sequence[bytes] | BaseException | None]] = asyncio.Queue(len(streams))

    rest = iter(enumerate(streams))

    async def feed() -> None:
        for number, stream in rest:  # one iterator for all tasks: each takes the next stream
            end: BaseException | None = None
            try:
                async with aclosing(stream):
                    async for messages in stream:
                        await queue.put((number, messages))
            except Exception as error:  # any error, raised below
                end = error
            await queue.put((number, end))

    feeds = [asyncio.ensure_future(feed()) for _ in range(min(len(streams), max_open or len(streams)))]
    try:
        num_open = len(streams)
        while num_open:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield number, item
    finally:
        for task in feeds:
            task.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)
