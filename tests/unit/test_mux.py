"""One connection's channels: two Muxes joined by pipes that cut and delay bytes anywhere, held against a model."""

import functools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.network.mux import (
    BEAT,
    END,
    FRAME,
    FULL_FRAME_BYTES,
    FULL_PART_BYTES,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    NOTE,
    OPEN,
    WINDOW,
    Channel,
    Mux,
    ProtocolError,
)
from protos import mux_pb2 as pb


@dataclass(eq=False)
class End:
    """One end of a channel, and what its user saw."""

    channel: Channel
    received: list[bytes] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)
    ends: list[bytes] = field(default_factory=list)
    reason: bytes | None = None
    """Reason with which this end has ended the channel."""

    def __post_init__(self) -> None:
        self.channel.on_messages = self.received.extend
        self.channel.on_end = self.ends.append

    def send(self, num_bytes: int) -> None:
        message = f"{len(self.sent)}:".encode().ljust(num_bytes, b".")
        if self.channel.is_open and self.reason is None:
            self.sent.append(message)
        self.channel.send(message)


class Side:
    """One end of a connection, and the pipe from it."""

    peer: "Side"

    def __init__(self, opening: bytes | None) -> None:
        self.ends: dict[int, End] = {}
        self.own: list[int] = []
        """Channels that this side opened."""
        self.pipe = bytearray()
        self.frames: deque[pb.Frame | None] = deque()
        """Frames that the peer has not processed; None: another kind."""
        self.paused: set[int] = set()
        """Channels that the peer has paused, as far as this side knows."""
        self.connection_ends: list[bytes] = []
        self.num_accepted = 0
        self.mux = Mux(opening, self._accepted, lambda: None)
        self.mux.on_end.append(self.connection_ends.append)

    def _accepted(self, channel: Channel, opening: bytes) -> None:
        end = self.ends[channel.number] = End(channel)
        end.received.append(opening)

    def open(self, num_bytes: int) -> None:
        end = End(self.mux.open(b"0:".ljust(num_bytes, b".")))
        end.sent.append(b"0:".ljust(num_bytes, b"."))
        self.ends[end.channel.number] = end
        self.own.append(end.channel.number)

    @property
    def num_unprocessed(self) -> int:
        return sum(frame is not None and bool(frame.parts) for frame in self.frames)

    def take(self) -> bool:
        """Send what is next; check it against the rules."""
        wanted, num_unprocessed = self.mux.wants_write, self.num_unprocessed
        knows_window = self.mux.peer_window > 0
        if not (raw := self.mux.take()):
            return False
        assert wanted
        self.pipe += raw
        if raw[4] != FRAME:
            self.frames.append(None)
            return True
        assert len(raw) <= MAX_FRAME_BYTES + 5
        frame = pb.Frame.FromString(raw[5:])
        self.frames.append(frame)
        if frame.parts and knows_window:
            assert num_unprocessed < WINDOW
        assert not self.paused & {part.number for part in frame.parts}
        return True

    def deliver(self, num_bytes: int) -> None:
        """Have the peer process so many bytes of the pipe."""
        data = bytes(self.pipe[:num_bytes])
        del self.pipe[:num_bytes]
        before = self.peer.mux.num_received
        self.peer.mux.receive(data)
        for _ in range(self.peer.mux.num_received - before):
            if (frame := self.frames.popleft()) is not None:
                self.peer.paused |= set(frame.paused)
                self.peer.paused -= set(frame.resumed)


def joined() -> tuple[Side, Side]:
    caller, server = Side(b"hello"), Side(None)
    caller.peer, server.peer = server, caller
    return caller, server


def settle(*sides: Side) -> None:
    """Deliver everything."""
    while any(side.take() or side.pipe for side in sides):
        for side in sides:
            while side.take():
                pass
            side.deliver(len(side.pipe))


MOVES = {
    "open": 1,
    "send": 4,
    "take": 3,
    "deliver": 3,
    "end": 1,
    "cancel": 1,
    "pause": 1,
    "resume": 1,
    "note": 1,
    "beat": 1,
}
moves = st.lists(
    st.tuples(
        st.sampled_from([move for move, weight in MOVES.items() for _ in range(weight)]),
        st.integers(0, 1),
        st.integers(0, 7),
        st.sampled_from([1, 3, 30, 200, FULL_PART_BYTES - 1, FULL_PART_BYTES + 1, FULL_FRAME_BYTES + 1]),
    ),
    min_size=20,
    max_size=150,
)


@given(moves, st.sampled_from(["", "ended", "lost"]))
@settings(max_examples=400, deadline=None)
def test_any_schedule(schedule: list[tuple[str, int, int, int]], at_last: str) -> None:
    """Messages arrive once and in order, or the channel ends at both ends."""
    sides = caller, server = joined()
    notes: list[bytes] = []
    caller.mux.on_note = server.mux.on_note = notes.append
    num_notes = 0
    for side in sides:
        side.open(1)
        side.open(1)
    for move, which, index, size in schedule:
        side = sides[which]
        number = sorted(side.ends)[index % len(side.ends)] if side.ends else 0
        end = side.ends.get(number)
        match move:
            case "open":
                side.open(size)
            case "take":
                side.take()
            case "deliver":
                side.deliver(size)
            case "note":
                side.mux.note(b"note")
                num_notes += 1
            case "beat":
                side.mux.beat()
            case "send" if end is not None:
                end.send(size)
            case "end" if end is not None and number not in side.own and end.channel.is_open and end.reason is None:
                end.reason = b"reason"
                end.channel.end(b"reason")
            case "cancel" if end is not None and number in side.own and end.channel.is_open:
                end.reason = b""
                end.channel.cancel()
            case "pause" if end is not None:
                end.channel.pause()
            case "resume" if end is not None:
                end.channel.resume()
    for side in sides:
        for end in side.ends.values():
            end.channel.resume()
    if at_last:
        _check_end(caller, server, at_last)
        return
    settle(caller, server)
    assert len(notes) == num_notes
    assert caller.mux.num_channels == server.mux.num_channels
    for opener, acceptor in (sides, sides[::-1]):
        assert acceptor.mux.num_accepted == sum(opener.ends[number].channel.is_open for number in opener.own)
        for number in opener.own:
            _check_channel(opener.ends[number], acceptor.ends.get(number))


def _check_channel(opened: End, accepted: End | None) -> None:
    if accepted is None:
        assert opened.reason == b"", "cancelled before it was sent"
        assert opened.received == opened.ends == []
        return
    assert accepted.received == opened.sent[: len(accepted.received)]
    assert opened.received == accepted.sent[: len(opened.received)]
    assert opened.channel.is_open == accepted.channel.is_open
    if opened.channel.is_open:
        assert accepted.received == opened.sent
        assert opened.received == accepted.sent
        assert opened.ends == accepted.ends == []
    elif opened.reason is None:
        assert opened.received == accepted.sent, "an end comes after all messages"
        assert opened.ends == [b"reason"]
        assert accepted.ends == []
    else:
        assert opened.ends == []
        assert accepted.ends in ([b""], []), "ended meanwhile by its own side, or cancelled"
        assert bool(accepted.ends) or accepted.reason is not None


def _check_end(caller: Side, server: Side, how: str) -> None:
    """The end of the connection ends what was open on both sides, once."""
    was_open = {end for side in (caller, server) for end in side.ends.values() if end.channel.is_open}
    if how == "ended":
        server.mux.end(b"over")
        while server.take():
            pass
        while server.pipe and caller.mux.is_open:
            server.deliver(1000)
    else:
        caller.mux.lost(b"over")
        server.mux.lost(b"over")
    assert not caller.mux.is_open
    assert not server.mux.is_open
    assert caller.connection_ends == server.connection_ends == [b"over"]
    for side in (caller, server):
        assert side.mux.num_channels == 0
        for end in side.ends.values():
            assert not end.channel.is_open
            if side is server and end in was_open:
                assert end.ends == [b"over"]
            assert len(end.ends) <= 1
            end.channel.send(b"too late")
            end.channel.cancel()
    caller.mux.open(b"too late")
    while raw := caller.mux.take():
        assert raw[4] != FRAME
    assert not caller.mux.wants_write


# ------------------------------------------------------------------------------------------------ flow


def test_a_late_reader_gets_fewer_and_larger_frames() -> None:
    caller, server = joined()
    caller.open(1)
    settle(caller, server)
    (end,) = server.ends.values()
    for _ in range(5 * WINDOW):
        end.send(10)
        server.take()
    for num_waiting in (4 * WINDOW, WINDOW, WINDOW):
        assert server.num_unprocessed == WINDOW
        assert not server.mux.wants_write
        server.deliver(len(server.pipe))
        while caller.take():  # credit
            pass
        caller.deliver(len(caller.pipe))
        assert server.take()
        (part,) = server.frames[0].parts  # type: ignore[union-attr]
        assert len(part.messages) == num_waiting
        for _ in range(2 * WINDOW - 1):
            end.send(10)
            server.take()
    settle(caller, server)
    assert caller.ends[1].received == end.sent


def test_frames_from_before_the_peer_told_its_window_count() -> None:
    caller, server = joined()
    caller.open(1)
    for _ in range(3 * WINDOW):
        caller.ends[1].send(10)
        caller.take()
    caller.deliver(10)  # the opening
    assert server.take()
    server.deliver(len(server.pipe))
    caller.ends[1].send(10)
    assert not caller.take()
    settle(caller, server)
    assert server.ends[1].received == caller.ends[1].sent


def test_a_channel_that_was_cancelled_before_it_left_takes_no_frame() -> None:
    caller, _ = joined()
    caller.open(1)
    caller.ends[1].channel.cancel()
    while caller.take():
        pass
    opening, window = caller.frames
    assert (opening, window) == (None, pb.Frame(window=WINDOW))


def test_a_reader_that_keeps_up_gives_its_credit_beside_what_it_sends() -> None:
    caller, server = joined()
    caller.open(1)
    settle(caller, server)
    caller.frames.clear()
    for _ in range(100):
        caller.ends[1].send(5)
        server.ends[1].send(5)
        for side in (caller, server):
            assert side.take()
            assert not side.mux.wants_write
            side.deliver(len(side.pipe))


def test_the_latest_of_pause_and_resume_holds_though_they_leave_in_one_frame() -> None:
    caller, server = joined()
    caller.open(1)
    settle(caller, server)
    channel, end = caller.ends[1].channel, server.ends[1]
    channel.pause()
    channel.pause()
    settle(caller, server)
    channel.resume()
    channel.pause()
    settle(caller, server)
    end.send(5)
    assert not server.mux.has_messages
    assert not server.take()
    channel.resume()
    settle(caller, server)
    end.send(5)
    channel.pause()
    while caller.take():
        pass
    caller.deliver(len(caller.pipe))
    assert not server.take()
    channel.resume()
    channel.pause()
    channel.resume()
    settle(caller, server)
    assert caller.ends[1].received == end.sent


def test_an_end_waits_for_a_paused_channel_and_drops_what_follows() -> None:
    caller, server = joined()
    caller.open(1)
    settle(caller, server)
    end = server.ends[1]
    caller.ends[1].channel.pause()
    settle(caller, server)
    end.channel.send(b"last")
    end.channel.end(b"")
    end.channel.send(b"after the end")
    settle(caller, server)
    assert caller.ends[1].ends == []
    caller.ends[1].channel.resume()
    settle(caller, server)
    assert caller.ends[1].received == [b"last"]
    assert caller.ends[1].ends == [b""]


def test_the_largest_message_is_carried_whatever_is_beside_it() -> None:
    caller, server = joined()
    caller.open(1)
    caller.open(1)
    settle(caller, server)
    for number, first in ((1, MAX_MESSAGE_BYTES), (2, FULL_PART_BYTES - 1)):
        for num_bytes in (first, MAX_MESSAGE_BYTES, 1):
            caller.ends[number].send(num_bytes)
    for _ in range(1000):
        caller.open(1)
        caller.ends[max(caller.ends)].channel.pause()
    settle(caller, server)
    for number, end in caller.ends.items():
        assert server.ends[number].received == end.sent


def test_one_channel_does_not_delay_the_others() -> None:
    caller, server = joined()
    caller.open(1)
    caller.open(1)
    settle(caller, server)
    for _ in range(100):
        server.ends[1].send(FULL_PART_BYTES // 4)
    server.ends[2].send(1)
    assert server.take()
    first, second = server.frames[0].parts[:2]  # type: ignore[union-attr]
    assert (first.number, len(first.messages)) == (1, 4)
    assert second.number == 2


def test_held_messages_wait_and_nothing_else_does() -> None:
    caller, server = joined()
    caller.mux.is_held = True
    caller.open(1)
    caller.mux.note(b"note")
    settle(caller, server)
    assert not server.ends
    assert caller.mux.has_messages
    caller.mux.is_held = False
    settle(caller, server)
    assert list(server.ends) == [1]


# ------------------------------------------------------------------------------------------------ bytes


def frame(kind: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(4, "big") + bytes([kind]) + payload


def parts(*each: pb.Part) -> bytes:
    return frame(FRAME, pb.Frame(parts=each).SerializeToString())


OPENED = frame(OPEN, b"hello")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (frame(BEAT), "before the connection was opened"),
        (OPENED + OPENED, "opened twice"),
        (OPENED + frame(99), "kind 99"),
        (OPENED + frame(FRAME, b"\xff"), "not a valid message"),
        (OPENED + (MAX_FRAME_BYTES + 1).to_bytes(4, "big") + bytes([FRAME]), f"at most {MAX_FRAME_BYTES}"),
        (OPENED + parts(pb.Part(number=1)), "has no opening"),
        (OPENED + parts(pb.Part(number=1, messages=[b""], ended=True)), "by the side that opened it"),
        (OPENED + parts(pb.Part(number=1 << 33, messages=[b""])), "never opened"),
    ],
)
def test_frames_that_no_peer_sends_are_refused(raw: bytes, expected: str) -> None:
    mux = Mux(None, lambda channel, opening: None, lambda: None)
    with pytest.raises(ProtocolError, match=expected):
        mux.receive(raw)


def test_what_a_peer_says_of_channels_that_are_over_is_overlooked() -> None:
    mux = Mux(None, lambda channel, opening: channel.end(), lambda: None)
    mux.receive(OPENED + parts(pb.Part(number=7, messages=[b""])))
    while mux.take():
        pass
    late = pb.Frame(
        cancelled=[7, 9], paused=[7, 9], resumed=[7, 9], credit=1000, parts=[pb.Part(number=7, messages=[b"x"])]
    )
    mux.receive(frame(FRAME, late.SerializeToString()) + parts(pb.Part(number=5, messages=[b"x"])))
    assert mux.num_channels == 0


garbage = st.one_of(
    st.binary(max_size=40),
    st.builds(frame, st.sampled_from([BEAT, OPEN, END, FRAME, NOTE, 3]), st.binary(max_size=20)),
    st.builds(
        lambda number, messages, ended, more: frame(
            FRAME, pb.Frame(parts=[pb.Part(number=number, messages=messages, ended=ended)], **more).SerializeToString()
        ),
        st.integers(0, 4) | st.integers((1 << 32) - 1, (1 << 32) + 4),
        st.lists(st.binary(max_size=3), max_size=3),
        st.booleans(),
        st.fixed_dictionaries(
            {},
            optional={name: st.lists(st.integers(0, 4), max_size=3) for name in ("cancelled", "paused", "resumed")}
            | {name: st.integers(0, (1 << 32) - 1) for name in ("credit", "window")},
        ),
    ),
)


@given(st.lists(garbage, max_size=12), st.booleans())
@settings(max_examples=500, deadline=None)
def test_whatever_comes_is_processed_or_refused(raws: list[bytes], is_caller: bool) -> None:
    """And the user's calls come in their order: an opening, messages, one end."""
    seen: dict[int, list[Any]] = {}

    def opened(channel: Channel, opening: bytes) -> None:
        calls = seen[channel.number] = ["open"]
        channel.on_messages = lambda messages: calls.append("message")
        channel.on_end = lambda reason: calls.append("end")
        channel.send(b"answer")

    mux = Mux(b"hello" if is_caller else None, opened, lambda: None)
    own = functools.partial(mux.open, b"own")
    if is_caller:
        own()
    else:
        raws = [OPENED, *raws]
    for raw in raws:
        try:
            mux.receive(raw)
        except ProtocolError:
            break
        while mux.take():
            pass
        if not mux.is_open:
            break
    mux.lost(b"")
    for calls in seen.values():
        assert calls[0] == "open"
        assert calls.count("end") == 1
        assert calls[-1] == "end"
