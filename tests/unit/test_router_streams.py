"""The worker's end of routers' connections: which one brings whose events, and what a router may not send."""

import asyncio

import pytest

from cluster.errors import InvalidRequest, Unavailable
from cluster.network.mux import Channel
from cluster.network.mux_stream import MuxStream
from protos import membership_pb2 as pb
from support.frame_pair import join
from support.virtual_loop import settle
from worker.front.membership import OPENED_S, RouterStreams


def opening(key: bytes) -> bytes:
    return pb.StreamOpening(key=key).SerializeToString()


def serving() -> tuple[RouterStreams, list[bytes]]:
    streams, requests = RouterStreams(), list[bytes]()

    def serve(channel: Channel, request: bytes) -> None:
        requests.append(request)

    streams.serve = serve
    return streams, requests


async def test_a_membership_finds_its_connection_whichever_comes_first() -> None:
    streams, requests = serving()
    waiting = asyncio.ensure_future(streams.of(b"late"))
    await settle()
    late, early = MuxStream(opening(b"late")), MuxStream(opening(b"early"))
    server, _, _ = join(late, streams.accept)
    join(early, streams.accept)
    early.mux.open(b"request")
    await settle()
    assert await waiting is server
    notes: list[bytes] = []
    early.mux.on_note = notes.append
    (await streams.of(b"early")).mux.note(b"event")
    await settle()
    assert notes == [b"event"]
    assert requests == [b"request"]
    early.end()
    await settle()
    with pytest.raises(Unavailable, match="did not connect to stream_port"):
        await streams.of(b"early")
    late.end()
    await settle()


async def test_a_router_that_does_not_connect_is_waited_for_so_long() -> None:
    began_at = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable, match="did not connect to stream_port"):
        await serving()[0].of(b"key")
    assert asyncio.get_running_loop().time() - began_at == pytest.approx(OPENED_S)


async def test_a_connection_without_a_key_serves_requests_and_is_of_no_membership() -> None:
    streams, requests = serving()
    router = MuxStream(opening(b""))
    join(router, streams.accept)
    router.mux.open(b"request")
    await settle()
    assert requests == [b"request"]
    with pytest.raises(Unavailable):
        await streams.of(b"")
    router.end()
    await settle()


@pytest.mark.parametrize(
    ("key", "error"), [(opening(b"key"), Unavailable), (b"\xff", InvalidRequest)], ids=["starting", "no message"]
)
async def test_a_connection_that_cannot_be_taken_is_ended_with_the_reason(key: bytes, error: type) -> None:
    router = MuxStream(key)
    join(router, RouterStreams().accept)
    await settle()
    assert type(router.ended) is error


async def test_a_note_of_a_router_ends_its_connection() -> None:
    router = MuxStream(opening(b"key"))
    join(router, serving()[0].accept)
    router.mux.note(b"event")
    await settle()
    assert isinstance(router.ended, InvalidRequest)
    assert "no notes" in str(router.ended)
