"""Connections of members: how their ends come to both sides, what a peer that is silent or does not read costs."""

import asyncio
import itertools

import pytest

from cluster.errors import InvalidRequest, Overloaded, ServiceError, Unavailable
from cluster.network.mux import BEAT, END, FRAME, MAX_FRAME_BYTES, NOTE, Channel
from cluster.network.mux_stream import BEAT_S, OPEN_S, SILENT_S, MuxServer, MuxStream
from protos import mux_pb2
from support.frame_pair import MemoryTransport, join
from support.virtual_loop import settle


def echo(stream: MuxStream, opening: bytes) -> None:
    """Serve channels that return what they get."""

    def serve(channel: Channel, first: bytes) -> None:
        channel.send(first)
        channel.on_messages = lambda messages: [channel.send(message) for message in messages]

    stream.on_channel = serve


def frames(raw: bytes) -> list[tuple[int, bytes]]:
    found = []
    while raw:
        end = 5 + int.from_bytes(raw[:4], "big")
        found.append((raw[4], raw[5:end]))
        raw = raw[end:]
    return found


async def test_what_one_turn_of_the_loop_brings_leaves_in_one_write() -> None:
    caller = MuxStream(b"hello")
    _, to_server, _ = join(caller, echo)
    await settle()
    to_server.writes.clear()
    received: dict[int, list[bytes]] = {}
    for number in range(3):
        channel = caller.mux.open(b"%d" % number)
        channel.on_messages = received.setdefault(number, []).extend
        channel.send(b"more")
    caller.mux.note(b"beside them")
    await settle()
    (written,) = to_server.writes
    (note, (kind, payload)) = frames(written)
    assert note == (NOTE, b"beside them")
    assert kind == FRAME
    assert [list(part.messages) for part in mux_pb2.Frame.FromString(payload).parts] == [
        [b"0", b"more"],
        [b"1", b"more"],
        [b"2", b"more"],
    ]
    assert received == {number: [b"%d" % number, b"more"] for number in range(3)}
    caller.end()
    await settle()


async def test_channels_may_be_opened_before_the_connection_stands() -> None:
    caller = MuxStream(b"hello")
    received: list[bytes] = []
    caller.mux.open(b"first").on_messages = received.extend
    caller.mux.open(b"not wanted").cancel()
    assert not caller.is_connected
    server, _, _ = join(caller, echo)
    await settle()
    assert received == [b"first"]
    assert server.mux.num_channels == 1
    caller.end()
    await settle()


async def test_an_end_is_told_to_both_sides_once_and_ends_the_channels_after() -> None:
    caller = MuxStream(b"hello")
    server, _, _ = join(caller, echo)
    ends: list[ServiceError] = []
    order: list[str] = []
    caller.on_end.append(ends.append)
    caller.on_end.append(lambda _: order.append("connection"))
    server.on_end.append(ends.append)
    caller.mux.open(b"a").on_end = lambda _: order.append("channel")
    await settle()
    server.end(Overloaded("no room", retry_after_s=1.5))
    server.end()
    await settle()
    assert [type(end) for end in ends] == [Overloaded, Overloaded]
    assert (type(caller.ended), caller.ended.retry_after_s) == (Overloaded, 1.5)
    assert order == ["connection", "channel"]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "big") + bytes([FRAME]), "at most"),
        (b"\0\0\0\1" + bytes([END]) + b"\xff", "not a valid message"),
        (b"\0\0\0\1" + bytes([FRAME]) + b"\xff", "not a valid message"),
        (b"\0\0\0\0" + bytes([99]), "kind 99"),
    ],
)
async def test_bytes_that_no_member_sends_end_the_connection_with_a_reason(raw: bytes, expected: str) -> None:
    caller = MuxStream(b"hello")
    server, _, _ = join(caller, echo)
    await settle()
    server.data_received(raw)
    assert isinstance(server.ended, InvalidRequest)
    assert expected in str(server.ended)
    await settle()
    assert caller.ended is not None, "the sender learns of it"


async def test_a_silent_peer_has_failed_and_a_quiet_one_has_not() -> None:
    caller = MuxStream(b"hello")
    server, to_server, to_caller = join(caller, echo)
    await asyncio.sleep(10 * BEAT_S)
    assert caller.ended is None
    assert server.ended is None
    to_caller.held.clear()
    to_server.held.clear()
    await asyncio.sleep(SILENT_S + 2 * BEAT_S)
    assert isinstance(caller.ended, Unavailable)
    assert "silent" in str(caller.ended)


async def test_a_quiet_side_beats_long_before_its_peer_gives_it_up() -> None:
    """A busy machine may delay a beat by seconds."""
    caller = MuxStream(b"hello")
    _, to_server, _ = join(caller, echo)
    await settle()
    loop, written_at = asyncio.get_running_loop(), list[float]()
    for tick in range(200):
        if tick == 42:
            caller.mux.note(b"just after a look")
        to_server.writes.clear()
        await asyncio.sleep(BEAT_S / 20)
        written_at += [loop.time()] * bool(to_server.writes)
    gaps = [later - earlier for earlier, later in itertools.pairwise(written_at)]
    assert max(gaps) < SILENT_S - BEAT_S
    caller.end()
    await settle()


async def test_a_heartbeat_is_never_written_to_a_closed_transport() -> None:
    """A transport closes before it tells of it."""
    caller = MuxStream(b"hello")
    _, to_server, _ = join(caller, echo)
    await settle()
    to_server.is_closed = True
    await asyncio.sleep(1.5 * BEAT_S)
    assert BEAT not in [kind for kind, _ in frames(b"".join(to_server.writes))]
    caller.connection_lost(None)
    assert isinstance(caller.ended, Unavailable)


async def test_nothing_is_taken_for_a_peer_that_does_not_read_until_it_reads() -> None:
    caller = MuxStream(b"hello")
    _, to_server, _ = join(caller, echo)
    channel = caller.mux.open(b"a")
    await settle()
    await caller.drained()
    to_server.writes.clear()
    caller.pause_writing()
    for number in range(5):
        channel.send(b"%d" % number)
        await settle()
    waiting = asyncio.ensure_future(caller.drained())
    await settle()
    assert not to_server.writes
    assert not waiting.done()
    caller.resume_writing()
    await waiting
    await settle()
    ((kind, payload),) = frames(to_server.writes[0])
    assert kind == FRAME
    assert list(mux_pb2.Frame.FromString(payload).parts[0].messages) == [b"0", b"1", b"2", b"3", b"4"]

    caller.pause_writing()
    waiting = asyncio.ensure_future(caller.drained())
    await settle()
    caller.end()
    await waiting
    assert to_server.is_closed
    await settle()


async def test_messages_are_delayed_and_notes_are_not() -> None:
    delay_s = 3.0
    loop, came_at = asyncio.get_running_loop(), dict[str, float]()

    def accept(stream: MuxStream, opening: bytes) -> None:
        stream.mux.on_note = lambda _: came_at.setdefault("note", loop.time())
        stream.on_channel = lambda channel, opening: came_at.setdefault(opening.decode(), loop.time())

    caller = MuxStream(b"hello", lambda: delay_s)
    join(caller, accept)
    began_at = loop.time()
    caller.mux.note(b"")
    caller.mux.open(b"a")
    caller.mux.open(b"b")
    await asyncio.sleep(2.0)
    caller.mux.open(b"c")
    await asyncio.sleep(1.5)
    caller.mux.open(b"d")
    await asyncio.sleep(5.0)
    assert {name: at - began_at for name, at in came_at.items()} == {"note": 0, "a": 3, "b": 3, "c": 3, "d": 6.5}
    delay_s = 0.0
    caller.mux.open(b"e")
    await settle()
    assert "e" in came_at
    caller.end()
    await settle()


async def test_a_caller_that_opens_no_connection_is_cut_off() -> None:
    stream = MuxServer(echo).connected()
    transport = MemoryTransport(1)
    transport.peer = MuxStream(b"")
    stream.connection_made(transport)
    await asyncio.sleep(OPEN_S + 0.1)
    assert isinstance(stream.ended, InvalidRequest)


async def test_a_connection_that_ended_before_it_stood_is_cut_off() -> None:
    caller = MuxStream(b"hello")
    caller.end()
    server, to_server, _ = join(caller, echo)
    await settle()
    assert server.ended is not None
    assert not to_server.writes


@pytest.mark.parametrize("kind", [FRAME, NOTE, BEAT])
async def test_a_first_frame_that_opens_nothing_is_refused(kind: int) -> None:
    stream = MuxServer(echo).connected()
    stream.data_received(b"\0\0\0\0" + bytes([kind]))
    assert isinstance(stream.ended, InvalidRequest)


async def test_a_peer_may_be_refused_when_it_connects_and_channels_that_nobody_expects_end_it() -> None:
    def refuse(stream: MuxStream, opening: bytes) -> None:
        raise Overloaded("no room", permanent=True)

    caller = MuxStream(b"hello")
    join(caller, refuse)
    await settle()
    assert isinstance(caller.ended, Overloaded)

    caller = MuxStream(b"hello")
    server, _, _ = join(caller, echo)
    await settle()
    server.mux.open(b"surprise")
    await settle()
    assert (type(caller.ended), caller.ended.field) == (InvalidRequest, "channel")
