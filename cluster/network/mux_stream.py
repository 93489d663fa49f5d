"""Connections of members over TCP, with TLS where the cluster has it: each drives a `Mux` on an event loop.

Either side beats while it has nothing to send, so a peer without a sign of life for SILENT_S has failed. The reason of
an end is a ServiceError, as a serialised google.rpc.Status.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from cluster.errors import InvalidRequest, ServiceError, StartError, Unavailable
from cluster.network.error_status import from_proto, to_proto
from cluster.network.mux import Channel, Mux, ProtocolError
from cluster.network.rpc import bind_reason
from cluster.network.tls import Credentials, MemberIdentity
from cluster.process.loop_watch import loop_time

BEAT_S = 3.0
"""Seconds between two looks at a connection; a side beats that has written nothing since its last look.

A quiet side's frames are up to twice as far apart. SILENT_S exceeds that by seconds, for beats of a busy machine.
"""
SILENT_S = 10.0
"""Seconds without a frame of the peer after which it has failed. A stall of this side's loop does not count."""
OPEN_S = 5.0
"""Seconds that a caller has for its first frame, after which the connection is closed."""
MAX_UNSENT_BYTES = 1 << 20
"""Bytes that wait for a peer that does not read, from which on nothing more is taken from the Mux."""

DelayS = Callable[[], float]
"""Function that returns the seconds by which messages of channels are delayed now, in a drill."""


def _no_delay() -> float:
    return 0.0


class MuxStream(asyncio.Protocol):
    """One end of a connection, used on its event loop."""

    def __init__(self, opening: bytes | None = None, delay_s: DelayS = _no_delay) -> None:
        """Create it; `opening` is the payload of the side that connects, by `connect`.

        Channels may be opened and notes sent before the connection stands.
        """
        self.mux = Mux(opening, lambda channel, first: self.on_channel(channel, first), self._wants_write)
        self.on_channel: Callable[[Channel, bytes], object] = _unexpected
        """Function that gets each channel that the peer opens, with its opening. A ServiceError that it raises ends the
        connection."""
        self.on_end: list[Callable[[ServiceError], object]] = []
        """Functions called once with the reason when the connection ends, whichever side ended it; before the channels
        end."""
        self.ended: ServiceError | None = None
        """Reason of the end; None while the connection is open."""
        self._delay_s = delay_s
        self.transport: asyncio.Transport | None = None
        self._heard_at = loop_time()
        self._has_written = False
        """Whether anything was sent since the last look at the peer."""
        self._room: asyncio.Future[None] | None = None
        """Waiter for the peer to read; None while it reads."""
        self._writing: asyncio.Handle | None = None
        """The next write, where one is due."""
        self._delay: asyncio.TimerHandle | None = None
        """End of the current delay of messages."""
        self._beats: asyncio.TimerHandle | None = None
        self.mux.on_end.append(self._over)

    async def connect(self, address: str, trust: MemberIdentity | None) -> None:
        """Connect to a MuxServer.

        Raises OSError, and ssl.SSLError among them.
        """
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        context, name = (None, None) if trust is None else trust.for_stream(host)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, host, int(port), ssl=context, server_hostname=name)

    @property
    def is_connected(self) -> bool:
        """Whether the connection was established."""
        return self.transport is not None

    async def drained(self) -> None:
        """Return when the peer reads, or the connection has ended."""
        if self._room is not None:
            await self._room

    def end(self, error: ServiceError | None = None) -> None:
        """End the connection on both sides, with an error of this side or without one."""
        if self.ended is None:
            self.ended = error or Unavailable("the connection was ended")
            self.mux.end(b"" if error is None else to_proto(error).SerializeToString())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        if self.ended is not None:  # while TLS was being agreed on
            self.transport.abort()
            return
        self.transport.set_write_buffer_limits(MAX_UNSENT_BYTES)
        self._heard_at = loop_time()
        self._beats = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
        self._wants_write()

    def data_received(self, data: bytes) -> None:
        self._heard_at = loop_time()
        if self.ended is not None:
            return
        try:
            self.mux.receive(data)
        except ServiceError as error:
            self.end(error)
        except ProtocolError as error:
            self.end(InvalidRequest("frame", str(error)))
        except DecodeError as error:
            self.end(InvalidRequest("frame", f"is not a valid message: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(Unavailable(f"the connection broke: {exc}" if exc is not None else "the connection was closed"))

    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._room is not None:
            room, self._room = self._room, None
            if not room.done():
                room.set_result(None)
            self._wants_write()

    def _wants_write(self) -> None:
        """Have all that this turn of the loop brings sent together."""
        if self._writing is None and self.transport is not None and self._room is None and self.ended is None:
            self._writing = asyncio.get_running_loop().call_soon(self._write_turn)

    def _write_turn(self) -> None:
        self._writing = None
        if self._delay is None and self.mux.has_messages and (delay_s := self._delay_s()) > 0:
            self.mux.is_held = True
            self._delay = asyncio.get_running_loop().call_later(delay_s, self._end_delay)
        self._write()

    def _end_delay(self) -> None:
        self._delay, self.mux.is_held = None, False
        self._write()

    def _write(self) -> None:
        """Write what the Mux has, as long as the peer reads it."""
        while self._room is None and self.mux.wants_write:
            frames, num_bytes = list[bytes](), 0
            while num_bytes < MAX_UNSENT_BYTES and (frame := self.mux.take()):
                frames.append(frame)
                num_bytes += len(frame)
            if frames and self.transport is not None and not self.transport.is_closing():
                self._has_written = True
                self.transport.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def _beat(self) -> None:
        if loop_time() - self._heard_at > SILENT_S:
            self._fail(Unavailable(f"the peer was silent for {SILENT_S:g} s"), is_lost=True)
            return
        if not self._has_written:
            self.mux.beat()
            self._write()  # now: a beat that left after this look would stand for the next one
        self._has_written = False
        self._beats = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _fail(self, reason: ServiceError, is_lost: bool = False) -> None:
        """End the connection on this side only."""
        if self.ended is None:
            self.ended = reason
            if is_lost and self.transport is not None:
                self.transport.abort()
            self.mux.lost(to_proto(reason).SerializeToString())

    def _over(self, reason: bytes) -> None:
        """Process the end of the Mux: that of the peer, with its reason, where this side has none."""
        if self.ended is None:
            self.ended = _error_of(reason) or Unavailable("the peer ended the connection")
        for timer in (self._beats, self._delay, self._writing):
            if timer is not None:
                timer.cancel()
        if self.transport is not None and not self.transport.is_closing():
            is_read = self._room is None
            self._write()
            # What was sent before is still delivered, unless nobody reads it.
            (self.transport.close if is_read else self.transport.abort)()
        self.resume_writing()
        self.on_channel = _unexpected
        for call in self.on_end:
            call(self.ended)
        self.on_end.clear()


def _error_of(reason: bytes) -> ServiceError | None:
    """Return the error of a peer's reason; None where it gives none."""
    try:
        return from_proto(status_pb2.Status.FromString(reason)) if reason else None
    except DecodeError as error:
        return InvalidRequest("frame", f"is not a valid message: {error}")


def _unexpected(channel: Channel, opening: bytes) -> None:
    raise InvalidRequest("channel", f"{channel.number} is not expected")


Accept = Callable[[MuxStream, bytes], object]
"""Function that takes a connection and its opening payload, and sets `on_channel`. A ServiceError that it raises ends
it."""


class MuxServer:
    """Listener for connections of members."""

    def __init__(self, accept: Accept, credentials: Credentials | None = None, delay_s: DelayS = _no_delay) -> None:
        """Create the server; with `credentials` it accepts members over TLS only."""
        self._accept = accept
        self._credentials = credentials
        self._delay_s = delay_s
        self._server: asyncio.Server | None = None
        self.streams: set[MuxStream] = set()

    async def start(self, host: str, port: int, setting: str) -> int:
        """Listen and return the port; 0 lets the system choose.

        Raises StartError naming `setting`.
        """
        context = None if self._credentials is None else self._credentials.for_http()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self.connected, host.strip("[]"), port, ssl=context
            )
        except OSError as error:
            reason = f"cannot listen on {host}:{port}: {bind_reason(host, port)}"
            raise StartError(setting, reason) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def close(self) -> None:
        """End all connections and stop listening."""
        if self._server is not None:
            self._server.close()
        for stream in tuple(self.streams):
            stream.end()

    def connected(self) -> MuxStream:
        """Return this side of a new connection."""
        stream = MuxStream(delay_s=self._delay_s)
        timer = asyncio.get_running_loop().call_later(
            OPEN_S, stream.end, InvalidRequest("frame", f"did not come within {OPEN_S:g} s")
        )

        def opened(opening: bytes) -> None:
            timer.cancel()
            self._accept(stream, opening)

        def ended(_: ServiceError) -> None:
            timer.cancel()
            self.streams.discard(stream)

        stream.mux.on_opened = opened
        stream.on_end.append(ended)
        self.streams.add(stream)
        return stream
