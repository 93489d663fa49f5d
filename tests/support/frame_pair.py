"""Two ends of a MuxStream in memory: each delivers what it is given at the next turn of the loop, in pieces."""

import asyncio
from typing import Any

from cluster.network.mux_stream import Accept, MuxServer, MuxStream


class MemoryTransport(asyncio.Transport):
    """Transport to another end. `held` keeps what is written from arriving."""

    def __init__(self, piece_bytes: int) -> None:
        super().__init__()
        self.peer: MuxStream
        self.held = asyncio.Event()
        self.held.set()
        self.writes: list[bytes] = []
        self.is_closed = False
        self._piece_bytes = piece_bytes
        self._sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._delivering = asyncio.ensure_future(self._deliver())

    def write(self, data: Any) -> None:
        assert not self.is_closed, "written after the end"
        self.writes.append(bytes(data))
        self._sent.put_nowait(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True
        self._sent.put_nowait(None)

    def abort(self) -> None:
        self.is_closed = True
        self._delivering.cancel()
        asyncio.get_running_loop().call_soon(self.peer.connection_lost, None)

    async def _deliver(self) -> None:
        while (data := await self._sent.get()) is not None:
            for at in range(0, len(data), self._piece_bytes):
                await self.held.wait()
                self.peer.data_received(data[at : at + self._piece_bytes])
        self.peer.connection_lost(None)


def join(
    caller: MuxStream, accept: Accept, piece_bytes: int = 1 << 20
) -> tuple[MuxStream, MemoryTransport, MemoryTransport]:
    """Connect a caller to a server in memory; return the server's end, the caller's transport and the server's."""
    server = MuxServer(accept).connected()
    transports = MemoryTransport(piece_bytes), MemoryTransport(piece_bytes)
    for end, transport, peer in zip((caller, server), transports, (server, caller), strict=True):
        transport.peer = peer
        end.connection_made(transport)
    return server, *transports
