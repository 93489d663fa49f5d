"""One address for several processes, as a Kubernetes Service is."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count


class ServiceAddress:
    """A connection goes to one of those that are ready when it comes, in turn, and stays with it until it ends."""

    def __init__(self) -> None:
        self.ready: list[str] = []
        self.address = ""
        self._turns = count()
        self._connections: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator["ServiceAddress"]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for connection in tuple(self._connections):
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        host, _, port = self.ready[next(self._turns) % len(self.ready)].rpartition(":")
        with contextlib.closing(writer):
            try:
                inner, outer = await asyncio.open_connection(host, int(port))
            except OSError:
                return
            with contextlib.closing(outer):
                await asyncio.wait(
                    [asyncio.ensure_future(_pass_on(reader, outer)), asyncio.ensure_future(_pass_on(inner, writer))],
                    return_when=asyncio.FIRST_COMPLETED,
                )


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
