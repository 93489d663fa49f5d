"""Stream to one worker over bare TCP, which also brings the worker's events: less CPU time than gRPC."""

import asyncio
from collections.abc import Awaitable, Callable

from cluster.errors import InvalidRequest, ServiceError, Unavailable
from cluster.network.frame_stream import FrameStream, connect
from cluster.network.protocol import DECODE_FRAMES, WORKER_EVENTS
from cluster.network.tls import MemberIdentity
from protos import decode_pb2 as pb
from protos import membership_pb2
from router.decode_client.decode_stream import DecodeStream

CONNECT_S = 3.0
"""Seconds for a connection, while the request could run elsewhere."""
Connect = Callable[[str, bytes, MemberIdentity | None], Awaitable[FrameStream]]
OnEvent = Callable[[membership_pb2.WorkerMessage], object]


class FrameDecodeStream(DecodeStream):
    """Stream that connects by itself."""

    def __init__(
        self,
        address: str,
        key: bytes,
        name: str,
        on_broken: Callable[[], object],
        on_event: OnEvent,
        trust: MemberIdentity | None,
        connects: Connect = connect,
    ) -> None:
        """Create the stream; `key` is that of the membership whose events it brings."""
        super().__init__(name, on_broken)
        self._on_event = on_event
        self._stream: FrameStream | None = None
        self._sending: asyncio.Handle | asyncio.Task[None] | None = None
        """The next sending of frames, where one is due."""
        opening = membership_pb2.StreamOpening(key=key).SerializeToString()
        self._connecting = asyncio.ensure_future(self._connect(connects(address, opening, trust), address))

    async def _connect(self, connecting: Awaitable[FrameStream], address: str) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                stream = await connecting
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"not within {CONNECT_S:g} s"
            self.break_off(Unavailable(f"no connection to worker {self._name} at {address} (stream_port): {reason}"))
            return
        stream.on_frame = self._take
        stream.on_end.append(self._ended)
        self._stream, self.connected = stream, True
        self._send()

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == DECODE_FRAMES:
            self._receive(pb.DecodeFrame.FromString(payload))
        elif kind == WORKER_EVENTS:
            self._on_event(membership_pb2.WorkerMessage.FromString(payload))
        else:
            raise InvalidRequest("frame", f"kind {kind} is unknown")

    def _ended(self, reason: ServiceError) -> None:
        self.break_off(Unavailable(f"the stream to worker {self._name} broke: {reason}"))

    def _wake(self) -> None:
        if self._sending is None and self._stream is not None:
            self._sending = asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        """Send what there is, while the worker reads."""
        self._sending = None
        stream = self._stream
        if stream is None or self.broken:
            return
        while self._has_news:
            if stream.is_behind:
                self._sending = asyncio.ensure_future(self._send_later(stream))
                return
            stream.send(DECODE_FRAMES, self._frame().SerializeToString())

    async def _send_later(self, stream: FrameStream) -> None:
        await stream.drained()
        self._send()

    def _close(self) -> None:
        self._connecting.cancel()
        if self._sending is not None:
            self._sending.cancel()
        if self._stream is not None:
            self._stream.end()
