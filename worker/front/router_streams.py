"""The worker's end of routers' connections: requests and tokens, and the worker's events."""

import asyncio
from collections.abc import Callable

from cluster.errors import Unavailable
from cluster.network.mux import Channel, ProtocolError
from cluster.network.mux_stream import MuxStream
from protos import membership_pb2 as pb

OPENED_S = 3.5
"""Seconds that a router has to connect after its Welcome; it gives up after 3."""
Serve = Callable[[Channel, bytes], object]
"""Function that serves a request of a router: a channel, and its opening."""


class RouterStreams:
    """Connections of all routers, by the key of the membership whose events they bring."""

    def __init__(self) -> None:
        self.serve: Serve | None = None
        """Server of requests; None while the worker starts."""
        self._opened: dict[bytes, MuxStream] = {}
        self._awaited: dict[bytes, asyncio.Future[MuxStream]] = {}

    def accept(self, stream: MuxStream, opening: bytes) -> None:
        """Take a connection that a router has opened."""
        key = pb.StreamOpening.FromString(opening).key
        if self.serve is None:
            raise Unavailable("this worker is starting")
        stream.on_channel, stream.mux.on_note = self.serve, _unexpected
        if not key:
            return
        self._opened[key] = stream
        stream.on_end.append(lambda _: self._opened.pop(key, None))
        if (awaited := self._awaited.get(key)) is not None and not awaited.done():
            awaited.set_result(stream)

    async def of(self, key: bytes) -> MuxStream:
        """Return the connection with this key.

        Raises Unavailable where the router does not open it.
        """
        if (stream := self._opened.get(key)) is not None:
            return stream
        awaited: asyncio.Future[MuxStream] = asyncio.get_running_loop().create_future()
        self._awaited[key] = awaited
        try:
            async with asyncio.timeout(OPENED_S):
                return await awaited
        except TimeoutError:
            raise Unavailable(f"the router did not connect to stream_port within {OPENED_S:g} s") from None
        finally:
            del self._awaited[key]


def _unexpected(note: bytes) -> None:
    raise ProtocolError("a router sends no notes")
