"""Many channels over one connection between two members, without I/O.

`cluster/network/mux_stream.py` drives one on an event loop, `loans/peers/sockets.py` in an engine's loop. On the wire a
frame is its payload's length in bytes, a kind, and the payload. The first frame of a connection is the caller's `OPEN`,
whose payload the other side reads as it likes. The last is `END` of either side, with a reason or nothing. Everything
between is a `Frame` of `protos/mux.proto`, or a *note*, a message of the connection itself.

    channel:  opened ──messages in both directions──▶ ended by the side that accepted it, or cancelled by the other

Flow has two levels. A channel that is *paused* by its reader sends nothing; what it has waits at its sender. And a side
that gives *credit* has at most WINDOW frames of its peer before it: a peer that is ahead collects messages, and sends
fewer and larger frames, so a late reader catches up.
"""

import struct
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence

from google.protobuf.message import DecodeError

from protos import mux_pb2 as pb

BEAT, OPEN, END, FRAME, NOTE = 0, 1, 2, 16, 17
"""Kinds of frames."""
MAX_FRAME_BYTES = 16 << 20
"""Largest payload of a frame; a longer one ends the connection."""
FULL_FRAME_BYTES = 1 << 20
"""Size after which a frame takes no more channels; the next frame takes them."""
FULL_PART_BYTES = 64 << 10
"""Size after which one channel's part of a frame ends, so that no channel delays the others."""
WINDOW = 32
"""Frames without credit after which a side waits. While a reader keeps up it is never reached."""
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - (1 << 10)
"""Largest message of a channel; it leaves room for its frame's other fields."""
ACCEPTED_FROM = 1 << 32
"""Number below the first channel that the accepting side opens."""

_HEAD = struct.Struct(">IB")

Fill = Callable[[pb.Part], bool]
"""Function that moves pending messages into a part, about FULL_PART_BYTES of them; returns whether it has more."""


class ProtocolError(Exception):
    """A frame that no correct peer sends."""


class Channel:
    """One end of a channel."""

    __slots__ = (
        "_fill",
        "_is_paused",
        "_is_pausing",
        "_mux",
        "_pending",
        "_was_sent",
        "end_reason",
        "is_open",
        "number",
        "on_end",
        "on_messages",
    )

    def __init__(self, mux: "Mux", number: int) -> None:
        self.number = number
        self.on_messages: Callable[[Sequence[bytes]], object] = _ignore
        """Function that gets the peer's messages."""
        self.on_end: Callable[[bytes], object] = _ignore
        """Function called once when the peer or the connection ends the channel, with the reason; empty: none.
        `Mux.is_open` is false by then where the connection ended, which may have no reason either."""
        self.is_open = True
        self._mux = mux
        self._pending: deque[bytes] = deque()
        self._fill: Fill | None = None
        self._is_paused = False
        """Whether the peer reads nothing of this channel now."""
        self._is_pausing = False
        """Whether this side reads nothing of it now."""
        self._was_sent = False
        """Whether anything of it has left, so that the peer knows it."""
        self.end_reason: bytes | None = None
        """Reason with which this side ends the channel, once its pending messages are sent."""

    def send(self, message: bytes) -> None:
        """Send a message of at most MAX_MESSAGE_BYTES with the next frame; it is dropped once the channel has ended."""
        if self.is_open and self.end_reason is None:
            self._pending.append(message)
            self.ready()

    def take_from(self, fill: Fill) -> None:
        """Take messages and the end from `fill` whenever a frame can be sent, instead of from `send` and `end`."""
        self._fill = fill

    def ready(self) -> None:
        """Announce that there is something to send."""
        if self.is_open and not self._is_paused:
            self._mux._ready[self.number] = self
            self._mux._wants()

    def end(self, reason: bytes = b"") -> None:
        """End a channel that the peer opened, after its pending messages."""
        if self.is_open:
            self.end_reason = reason
            self.ready()

    def cancel(self) -> None:
        """End a channel that this side opened: nothing that the peer sends on it matters any more."""
        if self.is_open:
            self._mux._cancel(self)

    def pause(self) -> None:
        """Have the peer keep its messages until `resume`."""
        if self.is_open and not self._is_pausing:
            self._is_pausing = True
            self._mux._announce(self.number, self._mux._leaving.paused, self._mux._leaving.resumed)

    def resume(self) -> None:
        """Have the peer send again; nothing happens on a channel that is not paused."""
        if self.is_open and self._is_pausing:
            self._is_pausing = False
            self._mux._announce(self.number, self._mux._leaving.resumed, self._mux._leaving.paused)

    @property
    def is_next_large(self) -> bool:
        """Whether its next message takes a frame of its own."""
        return bool(self._pending) and len(self._pending[0]) > FULL_FRAME_BYTES

    def _add_to(self, part: pb.Part) -> bool:
        """Move what waits into a part; return whether there is more."""
        if self._fill is not None:
            return self._fill(part)
        num_bytes = 0
        while self._pending and num_bytes < FULL_PART_BYTES:
            if num_bytes and self.is_next_large:
                return True
            message = self._pending.popleft()
            num_bytes += len(message)
            part.messages.append(message)
        if self._pending:
            return True
        if self.end_reason is not None:
            part.ended, part.status = True, self.end_reason
        return False

    def _pause(self) -> None:
        self._is_paused = True
        self._mux._ready.pop(self.number, None)

    def _resume(self) -> None:
        self._is_paused = False
        self.ready()


class Mux:
    """One end of a connection.

    A driver calls `receive` with the bytes that arrive, and sends what `take` returns whenever `on_wants_write` was
    called or room has come.
    """

    def __init__(
        self, opening: bytes | None, on_open: Callable[[Channel, bytes], object], on_wants_write: Callable[[], object]
    ) -> None:
        """Create it; `opening` is the payload of the side that connected, None of the other side.

        `on_open` gets each channel that the peer opens, with its opening.
        """
        self._on_open = on_open
        self._on_wants_write = on_wants_write
        self.on_opened: Callable[[bytes], object] = _ignore
        """Function that gets the caller's opening, on the side that was connected to."""
        self.on_note: Callable[[bytes], object] = _ignore
        """Function that gets the peer's notes."""
        self.on_end: list[Callable[[bytes], object]] = []
        """Functions called once when the connection ends, with the reason; before the channels end."""
        self.is_open = True
        self._is_caller = opening is not None
        self._is_greeted = self._is_caller
        self._numbers = 0 if self._is_caller else ACCEPTED_FROM
        self._highest = ACCEPTED_FROM if self._is_caller else 0
        """Number of the peer's latest channel."""
        self._channels: dict[int, Channel] = {}
        self._ready: dict[int, Channel] = {}
        """Channels with something to send that are not paused, the longest ready first."""
        self._leaving = pb.Frame(window=WINDOW)
        """The next frame, but for its parts."""
        self._raw: deque[bytes] = deque()
        """Frames that leave before any other."""
        self._num_without_credit = 0
        """Frames with parts that this side has sent and the peer has given no credit for."""
        self.is_held = False
        """Whether messages of channels wait for this side, as in a drill that delays them."""
        self.peer_window = 0
        """Frames that the peer takes without credit; 0 while it has not said that it gives any."""
        self._partial = bytearray()
        self._needed = _HEAD.size
        """Bytes that `_partial` must have before there is anything to do."""
        self.num_received = 0
        """Frames received, signs of life included."""
        if opening is not None:
            self._raw.append(_HEAD.pack(len(opening), OPEN) + opening)

    @property
    def num_channels(self) -> int:
        return len(self._channels)

    @property
    def num_accepted(self) -> int:
        """Number of open channels that the peer opened."""
        return sum((number > ACCEPTED_FROM) == self._is_caller for number in self._channels)

    def open(self, opening: bytes) -> Channel:
        """Open a channel; `on_messages` and `on_end` are to be set at once."""
        self._numbers += 1
        channel = Channel(self, self._numbers)
        if self.is_open:
            self._channels[channel.number] = channel
            channel.send(opening)
        else:
            channel.is_open = False
        return channel

    def note(self, payload: bytes) -> None:
        """Send a message of the connection itself."""
        if self.is_open:
            self._raw.append(_HEAD.pack(len(payload), NOTE) + payload)
            self._wants()

    def beat(self) -> None:
        """Send a sign of life."""
        if self.is_open:
            self._raw.append(_HEAD.pack(0, BEAT))
            self._wants()

    def end(self, reason: bytes = b"") -> None:
        """End the connection and all its channels; the peer gets the reason."""
        if self.is_open:
            self._raw.append(_HEAD.pack(len(reason), END) + reason)
            self._on_wants_write()
            self.lost(reason)

    def lost(self, reason: bytes) -> None:
        """Process the end of the connection. May be called again."""
        if not self.is_open:
            return
        self.is_open = False
        channels, self._channels = self._channels, {}
        self._ready.clear()
        for call in self.on_end:
            call(reason)
        self.on_end.clear()
        for channel in channels.values():
            channel.is_open = False
        for channel in channels.values():
            channel.on_end(reason)
            _forget_calls(channel)
        self.on_note = self.on_opened = _ignore

    # ------------------------------------------------------------------ what is sent

    @property
    def wants_write(self) -> bool:
        """Whether `take` would return anything now."""
        return bool(self._raw or self._has_control) or self._can_send

    @property
    def has_messages(self) -> bool:
        """Whether a channel has something to send, now or once there is credit."""
        return bool(self._ready)

    def take(self) -> bytes:
        """Return the next bytes to send: a frame, or nothing."""
        if self._raw:
            return self._raw.popleft()
        if not self.is_open:
            return b""
        frame = self._leaving
        if self._can_send:
            self._add_parts(frame)
        if not frame.parts and not self._has_control:
            return b""
        self._num_without_credit += bool(frame.parts)
        self._leaving = pb.Frame()
        payload = frame.SerializeToString()
        return _HEAD.pack(len(payload), FRAME) + payload

    @property
    def _has_control(self) -> bool:
        """Whether the next frame has something that needs no credit."""
        if not self.is_open:
            return False
        frame = self._leaving
        has_news = frame.cancelled or frame.paused or frame.resumed or (frame.window and self._is_greeted)
        return bool(has_news) or 2 * frame.credit >= WINDOW

    @property
    def _can_send(self) -> bool:
        """Whether the next frame may have parts."""
        has_credit = not self.peer_window or self._num_without_credit < self.peer_window
        return bool(self._ready) and has_credit and not self.is_held

    def _add_parts(self, frame: pb.Frame) -> None:
        num_bytes = 0
        while self._ready and num_bytes < FULL_FRAME_BYTES:
            number, channel = next(iter(self._ready.items()))
            if channel.is_next_large and (frame.parts or self._has_control):
                break
            del self._ready[number]
            part = frame.parts.add(number=number)
            if channel._add_to(part):
                self._ready[number] = channel
            if part.ended:
                self._ready.pop(number, None)
                self._close(number)
            elif not part.messages:
                frame.parts.pop()
                continue
            channel._was_sent = True
            num_bytes += part.ByteSize()

    def _wants(self) -> None:
        if self.is_open:
            self._on_wants_write()

    def _announce(self, number: int, news: MutableSequence[int], opposite: MutableSequence[int]) -> None:
        """Have the next frame tell of a channel, unless that only undoes what the same frame would tell."""
        if number in opposite:
            opposite.remove(number)
        else:
            news.append(number)
            self._wants()

    def _cancel(self, channel: Channel) -> None:
        self._ready.pop(channel.number, None)
        was_sent = channel._was_sent
        self._close(channel.number)
        if was_sent:
            self._leaving.cancelled.append(channel.number)
            self._wants()

    def _close(self, number: int) -> None:
        if (channel := self._channels.pop(number, None)) is not None:
            channel.is_open = False
            channel._pending.clear()
            _forget_calls(channel)

    # ------------------------------------------------------------------ what arrives

    def receive(self, data: bytes) -> None:
        """Process bytes that arrived. Raises ProtocolError, after which the connection is to be ended."""
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
                raise ProtocolError(f"frame has {length} bytes, at most {MAX_FRAME_BYTES} can be sent")
            end = at + _HEAD.size + length
            if end > num_bytes:
                self._needed = end - at
                break
            self._take_in(kind, data[at + _HEAD.size : end])
            if not self.is_open:
                return
            at = end
        if at < num_bytes:
            self._partial += memoryview(data)[at:]

    def _take_in(self, kind: int, payload: bytes) -> None:
        self.num_received += 1
        if not self._is_greeted and kind not in (OPEN, END):
            raise ProtocolError(f"a frame of kind {kind} came before the connection was opened")
        if kind == FRAME:
            try:
                frame = pb.Frame.FromString(payload)
            except DecodeError as error:
                raise ProtocolError(f"frame is not a valid message: {error}") from error
            self._on_frame(frame)
        elif kind == NOTE:
            self.on_note(payload)
        elif kind == END:
            self.lost(payload)
        elif kind == OPEN:
            if self._is_greeted:
                raise ProtocolError("the connection was opened twice")
            self._is_greeted = True
            self.on_opened(payload)
            self._wants()
        elif kind != BEAT:
            raise ProtocolError(f"frames of kind {kind} are unknown")

    def _on_frame(self, frame: pb.Frame) -> None:
        if frame.window:
            self.peer_window = frame.window
        if frame.credit:
            self._num_without_credit = max(0, self._num_without_credit - frame.credit)
            if self._ready:
                self._wants()
        for part in frame.parts:
            self._on_part(part)
            if not self.is_open:
                return
        if frame.cancelled or frame.paused or frame.resumed:
            self._on_control(frame)
        if frame.parts and self.peer_window:  # a peer of an earlier version, which gives no credit, reads none
            self._leaving.credit += 1
            if self._has_control:
                self._wants()

    def _on_control(self, frame: pb.Frame) -> None:
        for number in frame.cancelled:
            if (channel := self._channels.get(number)) is not None and self._is_peers(number):
                self._end_channel(channel, b"")
        for number in frame.paused:
            if (channel := self._channels.get(number)) is not None:
                channel._pause()
        for number in frame.resumed:
            if (channel := self._channels.get(number)) is not None:
                channel._resume()

    def _on_part(self, part: pb.Part) -> None:
        channel = self._channels.get(part.number)
        messages: Sequence[bytes] = part.messages
        if channel is None:
            if not self._is_peers(part.number) or part.number <= self._highest:
                if part.number > self._numbers and not self._is_peers(part.number):
                    raise ProtocolError(f"channel {part.number} was never opened")
                return  # it has ended meanwhile
            if not messages:
                raise ProtocolError(f"channel {part.number} has no opening")
            self._highest = part.number
            channel = self._channels[part.number] = Channel(self, part.number)
            self._on_open(channel, messages[0])
            messages = messages[1:]
        if messages and channel.is_open:
            channel.on_messages(messages)
        if part.ended and channel.is_open:
            if self._is_peers(part.number):
                raise ProtocolError(f"channel {part.number} was ended by the side that opened it")
            self._end_channel(channel, part.status)

    def _is_peers(self, number: int) -> bool:
        """Return whether a channel is one that the peer opens."""
        return (number > ACCEPTED_FROM) == self._is_caller

    def _end_channel(self, channel: Channel, reason: bytes) -> None:
        on_end = channel.on_end
        self._ready.pop(channel.number, None)
        self._close(channel.number)
        on_end(reason)


def _forget_calls(channel: Channel) -> None:
    """Break the reference cycle between a channel and who uses it."""
    channel.on_messages = channel.on_end = _ignore
    channel._fill = None


def _ignore(_: object) -> None:
    pass
