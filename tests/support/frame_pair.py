"""Two ends of a FrameStream in memory: each delivers what it is given at the next turn of the loop, in pieces."""

import asyncio
from collections.abc import Callable
from typing import Any

from cluster.network.frame_stream import OPEN, FrameStream


class MemoryTransport(asyncio.Transport):
    """Transport to another end. `held` keeps what is written from arriving."""

    def __init__(self, piece_bytes: int) -> None:
        super().__init__()
        self.peer: FrameStream
        self.held = asyncio.Event()
        self.held.set()
        self.num_written = 0
        self._piece_bytes = piece_bytes
        self._sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._delivering = asyncio.ensure_future(self._deliver())

    def write(self, data: Any) -> None:
        self.num_written += len(data)
        self._sent.put_nowait(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        self._sent.put_nowait(None)

    def abort(self) -> None:
        self._delivering.cancel()
        asyncio.get_running_loop().call_soon(self.peer.connection_lost, None)

    async def _deliver(self) -> None:
        while (data := await self._sent.get()) is not None:
            for at in range(0, len(data), self._piece_bytes):
                await self.held.wait()
                self.peer.data_received(data[at : at + self._piece_bytes])
        self.peer.connection_lost(None)


Ends = tuple[FrameStream, FrameStream]


def joined(piece_bytes: int = 1 << 20) -> tuple[Ends, tuple[MemoryTransport, MemoryTransport]]:
    """Return two streams that are connected, and the transport that each writes to."""
    ends = FrameStream(), FrameStream()
    transports = MemoryTransport(piece_bytes), MemoryTransport(piece_bytes)
    for end, transport, peer in zip(ends, transports, reversed(ends), strict=True):
        transport.peer = peer
        end.connection_made(transport)
    return ends, transports


def opened(accept: Callable[[FrameStream, bytes], object], opening: bytes) -> tuple[FrameStream, MemoryTransport]:
    """Return the caller's end of a stream that `accept` serves, and the transport to the caller."""
    (caller, server), (_, to_caller) = joined()

    def first(kind: int, payload: bytes) -> None:
        assert kind == OPEN
        accept(server, payload)

    server.on_frame = first
    caller.send(OPEN, opening)
    return caller, to_caller
