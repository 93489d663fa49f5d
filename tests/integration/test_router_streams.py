"""Streams of routers to workers: over bare TCP where a worker has a port for them, else over gRPC; and their ends."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import Overloaded, ServiceError
from cluster.network.frame_stream import FIRST_KIND, FrameServer, FrameStream, connect
from engine.config import WorkerConfig
from protos import membership_pb2
from router.config import RouterConfig
from support.cut_link import CutLink
from support.ports import free_port
from support.processes import Stream, finished
from tandem.client import Client
from tandem.local.local_cluster import start_role, stop_process
from tandem.local.sim_workers import SimPool

NUM_TOKENS = 60


async def tokens(client: Client, count: int = NUM_TOKENS) -> list[int]:
    stream = Stream(client, [1, 2, 3], count)
    await finished([stream])
    return stream.token_ids


def streams_of(pool: SimPool, worker_id: str) -> Any:
    return pool.workers[worker_id].worker._frame_server._streams


@pytest.fixture
async def router(model: Path) -> Any:
    started = await start_role("router", "router", RouterConfig.parse({"model": model, "port": 0}))
    yield started
    await stop_process(started.process)


def worker_of(model: Path, router: Any, **settings: Any) -> WorkerConfig:
    fields = {"model": model, "engine": "sim", "routers": (router.address,), "worker_id": "d", "sim_step_ms": 20.0}
    return WorkerConfig.parse(fields | settings)


async def test_both_ways_give_the_same_tokens(model: Path, router: Any) -> None:
    found = []
    for stream_port, num_streams in ((0, 1), (None, 0)):
        pool = SimPool()
        await pool.start("decode", worker_of(model, router, stream_port=stream_port))
        async with Client(router.address) as client:
            await client.wait_for_workers(0, 1, 120)
            found.append(await tokens(client))
            assert len(streams_of(pool, "d")) == num_streams
        await pool.stop("d")
    assert found[0] == found[1]


async def test_a_server_takes_streams_and_ends_what_is_none() -> None:
    taken: list[tuple[bytes, Any]] = []

    def accept(stream: FrameStream, opening: bytes) -> None:
        if opening == b"unwanted":
            raise Overloaded("no room", permanent=True)
        taken.append((opening, stream))
        stream.on_frame = lambda kind, payload: stream.send(kind, payload[::-1])

    server = FrameServer(accept)
    port = await server.start("127.0.0.1", 0, "port")
    stream = await connect(f"127.0.0.1:{port}", b"hello", None)
    echoed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    stream.on_frame = lambda _, payload: echoed.set_result(payload)
    big = bytes(range(256)) * 20_000
    stream.send(FIRST_KIND, big)
    assert await echoed == big[::-1]
    assert [opening for opening, _ in taken] == [b"hello"]

    refused = await connect(f"127.0.0.1:{port}", b"unwanted", None)
    ended: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()
    refused.on_end.append(ended.set_result)
    assert isinstance(await ended, Overloaded)

    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert b"can be sent" in await reader.read()
    writer.close()
    server.close()


async def test_a_broken_stream_loses_no_token_and_its_worker_joins_again(model: Path, router: Any) -> None:
    pool = SimPool()
    await pool.start("decode", worker_of(model, router))
    async with Client(router.address) as client:
        await client.wait_for_workers(0, 1, 120)
        undisturbed = await tokens(client)
        for _ in range(3):
            stream = Stream(client, [1, 2, 3], NUM_TOKENS)
            await stream.reached(5)
            (broken,) = streams_of(pool, "d")
            broken._transport.abort()
            await finished([stream])
            assert stream.token_ids == undisturbed
            assert stream.receipt.placement.attempt == 2
        (again,) = streams_of(pool, "d")
        assert again is not broken
    await pool.close()


async def test_a_worker_whose_port_for_streams_cannot_be_reached_serves_over_grpc(model: Path, router: Any) -> None:
    pool, port = SimPool(), free_port("127.0.0.1", "127.0.0.2")
    async with CutLink("127.0.0.2", port, "127.0.0.1"), Client(router.address) as client:
        await pool.start("decode", worker_of(model, router, port=port, advertise_host="127.0.0.2"))
        await client.wait_for_workers(0, 1, 120)
        assert len(await tokens(client)) == NUM_TOKENS
        assert not streams_of(pool, "d")
        await pool.close()


async def test_a_stream_without_a_key_serves_requests_and_gets_no_events(model: Path, router: Any) -> None:
    """So does one that is opened again before its worker has joined again."""
    pool = SimPool()
    started = await pool.start("decode", worker_of(model, router))
    opening = membership_pb2.StreamOpening().SerializeToString()
    stream = await connect(started.worker._context.stream_address, opening, None)
    kinds: list[int] = []
    stream.on_frame = lambda kind, payload: kinds.append(kind)
    await asyncio.sleep(0.5)  # reports come several times a second
    assert kinds == []
    assert stream.ended is None
    stream.end()
    await pool.close()
