"""Streams of messages between two members over one TCP connection, where gRPC takes several times the CPU time.

Either side sends frames: a payload's length in bytes, a kind, and the payload. The first frame of a connection is the
caller's `OPEN`, whose payload the server reads as it likes. The last is `END` of either side, with a status or nothing.
Each side beats while it has nothing to send, so a peer without a sign of life for SILENT_S has failed.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Final, cast

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from cluster.errors import InvalidRequest, ServiceError, StartError, Unavailable
from cluster.network.error_status import from_proto, to_proto
from cluster.network.rpc import MAX_MESSAGE_BYTES, bind_reason
from cluster.network.tls import Credentials, MemberIdentity
from cluster.process.loop_watch import loop_time

BEAT, OPEN, END = 0, 1, 2
FIRST_KIND: Final = 16
"""First kind of a stream's users; those below are the stream's own."""
BEAT_S = 5.0
"""Seconds without a frame after which a side beats."""
SILENT_S = 10.0
"""Seconds without a frame of the peer after which it has failed. A stall of this side's loop does not count."""
OPEN_S = 5.0
"""Seconds that a caller has for its first frame, after which the connection is closed."""
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES
"""Largest payload."""
MAX_UNSENT_BYTES = 1 << 20
"""Bytes that wait for a peer that does not read, from which on `drained` waits."""

_HEAD = struct.Struct(">IB")
OnFrame = Callable[[int, bytes], object]
"""Function that gets a frame's kind and payload. A ServiceError that it raises ends the stream."""


class FrameStream(asyncio.Protocol):
    """One end of a stream, used on its event loop."""

    def __init__(self) -> None:
        self.on_frame: OnFrame = _unexpected
        self.on_end: list[Callable[[ServiceError], object]] = []
        """Functions called once with the reason when the stream ends, whichever side ended it."""
        self.ended: ServiceError | None = None
        """Reason of the end; None while the stream is open."""
        self._transport: asyncio.Transport | None = None
        self._partial = bytearray()
        self._needed = _HEAD.size
        """Bytes that `_partial` must have before there is anything to do."""
        self._heard_at = loop_time()
        self._is_sending = False
        """Whether a frame was sent since the last beat."""
        self._room: asyncio.Future[None] | None = None
        """Waiter for the peer to read; None while it reads."""
        self._beats: asyncio.TimerHandle | None = None

    def send(self, kind: int, payload: bytes) -> None:
        """Send a frame; it is dropped once the stream has ended."""
        if self._transport is not None and self.ended is None:
            self._is_sending = True
            self._transport.write(_HEAD.pack(len(payload), kind) + payload)

    @property
    def is_behind(self) -> bool:
        """Whether the peer does not read what waits for it."""
        return self._room is not None

    async def drained(self) -> None:
        """Return when the peer reads, or the stream has ended."""
        if self._room is not None:
            await self._room

    def end(self, error: ServiceError | None = None) -> None:
        """End the stream on both sides, with an error of this side or without one."""
        if self.ended is None:
            status = b"" if error is None else to_proto(error).SerializeToString()
            self.send(END, status)
            self._over(error or Unavailable("the stream was ended"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        if self.ended is not None:  # while TLS was being agreed on
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(MAX_UNSENT_BYTES)
        self._heard_at = loop_time()
        self._beats = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def data_received(self, data: bytes) -> None:
        self._heard_at = loop_time()
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return
            data = bytes(self._partial)
            self._partial.clear()
        at, num_bytes = 0, len(data)
        self._needed = _HEAD.size
        while num_bytes - at >= _HEAD.size:
            length, kind = _HEAD.unpack_from(data, at)
            if length > MAX_FRAME_BYTES:
                self.end(InvalidRequest("frame", f"has {length} bytes, at most {MAX_FRAME_BYTES} can be sent"))
                return
            end = at + _HEAD.size + length
            if end > num_bytes:
                self._needed = end - at
                break
            self._take(kind, data[at + _HEAD.size : end])
            if self.ended is not None:
                return
            at = end
        if at < num_bytes:
            self._partial += memoryview(data)[at:]

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == BEAT:
            return
        try:
            if kind == END:
                error = from_proto(status_pb2.Status.FromString(payload)) if payload else None
                self._over(error or Unavailable("the peer ended the stream"))
            else:
                self.on_frame(kind, payload)
        except ServiceError as error:
            self.end(error)
        except DecodeError as error:
            self.end(InvalidRequest("frame", f"is not a valid message: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._over(Unavailable(f"the connection broke: {exc}" if exc is not None else "the connection was closed"))

    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._room is not None:
            room, self._room = self._room, None
            if not room.done():
                room.set_result(None)

    def _beat(self) -> None:
        if loop_time() - self._heard_at > SILENT_S:
            self._over(Unavailable(f"the peer was silent for {SILENT_S:g} s"), is_lost=True)
            return
        if not self._is_sending:
            self.send(BEAT, b"")
        self._is_sending = False
        self._beats = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _over(self, reason: ServiceError, is_lost: bool = False) -> None:
        if self.ended is not None:
            return
        self.ended = reason
        if self._beats is not None:
            self._beats.cancel()
        if self._transport is not None:
            # What was sent before is still delivered, unless nobody reads it.
            (self._transport.abort if is_lost or self.is_behind else self._transport.close)()
        self.resume_writing()
        self.on_frame = _unexpected
        for call in self.on_end:
            call(reason)
        self.on_end.clear()


def _unexpected(kind: int, payload: bytes) -> None:
    raise InvalidRequest("frame", f"kind {kind} is not expected")


async def connect(address: str, opening: bytes, trust: MemberIdentity | None) -> FrameStream:
    """Connect to a FrameServer and open a stream.

    Raises OSError, and ssl.SSLError among them.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    context, name = (None, None) if trust is None else trust.for_stream(host)
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(FrameStream, host, int(port), ssl=context, server_hostname=name)
    stream.send(OPEN, opening)
    return stream


Accept = Callable[[FrameStream, bytes], object]
"""Function that takes a stream and its opening payload, and sets `on_frame`. A ServiceError that it raises ends it."""


class FrameServer:
    """Listener for streams of members."""

    def __init__(self, accept: Accept, credentials: Credentials | None = None) -> None:
        """Create the server; with `credentials` it accepts members over TLS only."""
        self._accept = accept
        self._credentials = credentials
        self._server: asyncio.Server | None = None
        self._streams: set[FrameStream] = set()

    async def start(self, host: str, port: int, setting: str) -> int:
        """Listen and return the port; 0 lets the system choose.

        Raises StartError naming `setting`.
        """
        context = None if self._credentials is None else self._credentials.for_http()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connected, host.strip("[]"), port, ssl=context
            )
        except OSError as error:
            reason = f"cannot listen on {host}:{port}: {bind_reason(host, port)}"
            raise StartError(setting, reason) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def close(self) -> None:
        """End all streams and stop listening."""
        if self._server is not None:
            self._server.close()
        for stream in tuple(self._streams):
            stream.end()

    def _connected(self) -> FrameStream:
        stream = FrameStream()
        timer = asyncio.get_running_loop().call_later(
            OPEN_S, stream.end, InvalidRequest("frame", f"did not come within {OPEN_S:g} s")
        )

        def opened(kind: int, payload: bytes) -> None:
            if kind != OPEN:
                raise InvalidRequest("frame", f"kind {kind} came before the stream was opened")
            timer.cancel()
            stream.on_frame = _unexpected
            self._accept(stream, payload)

        def ended(_: ServiceError) -> None:
            timer.cancel()
            self._streams.discard(stream)

        stream.on_frame = opened
        stream.on_end.append(ended)
        self._streams.add(stream)
        return stream
