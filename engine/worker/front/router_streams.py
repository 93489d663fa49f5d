"""The worker's end of routers' streams over bare TCP: requests and tokens, and the worker's events."""

import asyncio
from collections.abc import Callable

from cluster.errors import InvalidRequest, ServiceError, Unavailable
from cluster.network.frame_stream import FrameStream
from cluster.network.protocol import DECODE_FRAMES
from protos import membership_pb2 as pb

OPENED_S = 3.5
"""Seconds that a router has to open its stream after its Welcome; it gives up after 3."""
Serve = Callable[[FrameStream], Callable[[bytes], object]]
"""Function that serves a router's requests on a stream; it returns the function that takes the router's frames."""


class RouterStreams:
    """Streams of all routers, by the key of the membership whose events they bring."""

    def __init__(self) -> None:
        self.serve: Serve = _not_served
        self._opened: dict[bytes, FrameStream] = {}
        self._awaited: dict[bytes, asyncio.Future[FrameStream]] = {}

    def accept(self, stream: FrameStream, opening: bytes) -> None:
        """Take a stream that a router has opened."""
        key = pb.StreamOpening.FromString(opening).key
        take = self.serve(stream)

        def received(kind: int, payload: bytes) -> None:
            if kind != DECODE_FRAMES:
                raise InvalidRequest("frame", f"kind {kind} is unknown")
            take(payload)

        stream.on_frame = received
        if not key:
            return
        self._opened[key] = stream
        stream.on_end.append(lambda _: self._opened.pop(key, None))
        if (awaited := self._awaited.get(key)) is not None and not awaited.done():
            awaited.set_result(stream)

    async def of(self, key: bytes) -> FrameStream:
        """Return the stream with this key.

        Raises Unavailable where the router does not open it.
        """
        if (stream := self._opened.get(key)) is not None:
            return stream
        awaited: asyncio.Future[FrameStream] = asyncio.get_running_loop().create_future()
        self._awaited[key] = awaited
        try:
            async with asyncio.timeout(OPENED_S):
                return await awaited
        except TimeoutError:
            raise Unavailable(f"the router opened no stream at stream_port within {OPENED_S:g} s") from None
        finally:
            del self._awaited[key]


def _not_served(stream: FrameStream) -> Callable[[bytes], object]:
    raise Unavailable("this worker is starting")


def end_of(stream: FrameStream, call: Callable[[], object]) -> None:
    """Call a function when the stream ends, at once if it has ended."""
    if stream.ended is not None:
        call()
        return

    def ended(_: ServiceError) -> None:
        call()

    stream.on_end.append(ended)
