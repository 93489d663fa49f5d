"""Streams of frames: what arrives, whatever the pieces of bytes; and how they end."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import InvalidRequest, Overloaded, ServiceError, Unavailable
from cluster.network.frame_stream import (
    BEAT_S,
    END,
    FIRST_KIND,
    MAX_FRAME_BYTES,
    OPEN,
    OPEN_S,
    SILENT_S,
    FrameServer,
    FrameStream,
)
from support.frame_pair import joined
from support.virtual_loop import run_virtually, settle


@given(
    st.lists(st.tuples(st.integers(FIRST_KIND, 255), st.binary(max_size=300)), max_size=30),
    st.integers(1, 700),
)
@settings(max_examples=200, deadline=None)
def test_frames_arrive_whole_and_in_order(frames: list[tuple[int, bytes]], piece_bytes: int) -> None:
    async def run() -> None:
        (one, other), (transport, _) = joined(piece_bytes)
        received: list[tuple[int, bytes]] = []
        other.on_frame = lambda kind, payload: received.append((kind, payload))
        for frame in frames:
            one.send(*frame)
        await settle()
        assert received == frames
        assert transport.num_written == sum(5 + len(payload) for _, payload in frames)
        one.end()
        other.end()

    run_virtually(run())


async def test_an_end_is_told_to_both_sides_once() -> None:
    (one, other), _ = joined()
    ends: dict[str, list[ServiceError]] = {"one": [], "other": []}
    one.on_end.append(ends["one"].append)
    other.on_end.append(ends["other"].append)
    one.end(Overloaded("no room", retry_after_s=1.5))
    one.end()
    one.send(FIRST_KIND, b"too late")
    await settle()
    assert [len(each) for each in ends.values()] == [1, 1]
    reason = ends["other"][0]
    assert isinstance(reason, Overloaded)
    assert reason.retry_after_s == 1.5


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "big") + bytes([FIRST_KIND]), "at most"),
        (b"\0\0\0\1" + bytes([END]) + b"\xff", "not a valid message"),
        (b"\0\0\0\0" + bytes([FIRST_KIND]), "is not expected"),
    ],
)
async def test_bytes_that_no_member_sends_end_the_stream_with_a_reason(raw: bytes, expected: str) -> None:
    (one, other), _ = joined()
    one.data_received(raw)
    assert isinstance(one.ended, InvalidRequest)
    assert expected in str(one.ended)
    await settle()
    assert isinstance(other.ended, InvalidRequest), "the sender learns why"


def test_a_silent_peer_has_failed_and_a_quiet_one_has_not() -> None:
    async def run() -> None:
        (one, other), (to_other, to_one) = joined()
        await asyncio.sleep(10 * BEAT_S)
        assert one.ended is None
        assert other.ended is None
        to_one.held.clear()
        to_other.held.clear()
        await asyncio.sleep(SILENT_S + 2 * BEAT_S)
        assert isinstance(one.ended, Unavailable)
        assert "silent" in str(one.ended)

    run_virtually(run())


async def test_drained_waits_for_a_peer_that_does_not_read() -> None:
    (one, _), _ = joined()
    await one.drained()
    one.pause_writing()
    waiting = asyncio.ensure_future(one.drained())
    await settle()
    assert one.is_behind
    assert not waiting.done()
    one.resume_writing()
    await waiting
    one.pause_writing()
    waiting = asyncio.ensure_future(one.drained())
    await settle()
    one.end()
    await waiting


def test_a_caller_that_opens_no_stream_is_cut_off() -> None:
    async def run() -> None:
        server = FrameServer(lambda stream, opening: None)
        (caller, _), _ = joined()
        stream = server._connected()
        transport = joined()[1][0]
        transport.peer = caller
        stream.connection_made(transport)
        await asyncio.sleep(OPEN_S + 0.1)
        assert isinstance(stream.ended, InvalidRequest)

    run_virtually(run())


async def test_a_stream_that_ended_before_its_connection_stood_is_cut_off() -> None:
    (peer, _), (transport, _) = joined()
    stream = FrameStream()
    stream.end()
    transport.peer = peer
    stream.connection_made(transport)
    await settle()
    assert peer.ended is not None


async def test_a_first_frame_that_opens_nothing_is_refused() -> None:
    stream = FrameServer(lambda stream, opening: None)._connected()
    stream.data_received(b"\0\0\0\0" + bytes([FIRST_KIND]))
    assert isinstance(stream.ended, InvalidRequest)
    assert OPEN != FIRST_KIND
