"""Connections of routers to workers, and their ends."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from google.rpc import status_pb2

from cluster.errors import Incompatible, Overloaded, ServiceError
from cluster.network.error_status import from_proto
from cluster.network.mux_stream import MuxServer, MuxStream
from engine.config import WorkerConfig
from protos import decode_pb2, membership_pb2
from router.config import RouterConfig
from support.cut_link import CutLink
from support.ports import free_port
from support.processes import Stream, finished, until
from tandem.client import Client
from tandem.local.local_cluster import start_role, stop_process
from tandem.local.sim_workers import SimPool

NUM_TOKENS = 60


async def tokens(client: Client, count: int = NUM_TOKENS) -> list[int]:
    stream = Stream(client, [1, 2, 3], count)
    await finished([stream])
    return stream.token_ids


def streams_of(pool: SimPool, worker_id: str) -> Any:
    return pool.workers[worker_id].worker.stream_server.streams


@pytest.fixture
async def router(model: Path) -> Any:
    started = await start_role("router", "router", RouterConfig.parse({"model": model, "port": 0}))
    yield started
    await stop_process(started.process)


def worker_of(model: Path, router: Any, **settings: Any) -> WorkerConfig:
    fields = {"model": model, "engine": "sim", "routers": (router.address,), "worker_id": "d", "sim_step_ms": 20.0}
    return WorkerConfig.parse(fields | settings)


async def test_a_server_takes_connections_and_ends_what_is_none() -> None:
    taken: list[bytes] = []

    def accept(stream: MuxStream, opening: bytes) -> None:
        if opening == b"unwanted":
            raise Overloaded("no room", permanent=True)
        taken.append(opening)
        stream.on_channel = lambda channel, first: channel.send(first[::-1])

    server = MuxServer(accept)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0, 'port')}"
    stream = MuxStream(b"hello")
    big = bytes(range(256)) * 20_000
    echoed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    stream.mux.open(big).on_messages = lambda messages: echoed.set_result(messages[0])
    await stream.connect(address, None)
    assert await echoed == big[::-1]
    assert taken == [b"hello"]

    refused = MuxStream(b"unwanted")
    ended: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()
    refused.on_end.append(ended.set_result)
    await refused.connect(address, None)
    assert isinstance(await ended, Overloaded)

    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
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
            broken.transport.abort()
            await finished([stream])
            assert stream.token_ids == undisturbed
            assert stream.receipt.placement.attempt == 2
        (again,) = streams_of(pool, "d")
        assert again is not broken
    await pool.close()


async def test_a_worker_that_cannot_be_reached_is_told_so_and_joins_once_it_can(
    model: Path, router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worker.front.membership")
    pool, port = SimPool(), free_port("127.0.0.1", "127.0.0.2")
    stream_port = free_port("127.0.0.1", "127.0.0.2")
    async with CutLink("127.0.0.2", port, "127.0.0.1"), Client(router.address) as client:
        await pool.start(
            "decode", worker_of(model, router, port=port, stream_port=stream_port, advertise_host="127.0.0.2")
        )

        await until(
            lambda: f"no connection to worker d at 127.0.0.2:{stream_port} (stream_port)" in caplog.text,
            "the worker is told why",
        )
        async with CutLink("127.0.0.2", stream_port, "127.0.0.1"):
            await client.wait_for_workers(0, 1, 120)
            assert len(await tokens(client)) == NUM_TOKENS
            await pool.close()


async def test_a_connection_without_a_key_serves_requests_and_gets_no_events(model: Path, router: Any) -> None:
    """So does one that is opened again before its worker has joined again."""
    pool = SimPool()
    started = await pool.start("decode", worker_of(model, router))
    stream = MuxStream(membership_pb2.StreamOpening().SerializeToString())
    notes: list[bytes] = []
    stream.mux.on_note = notes.append
    await stream.connect(started.worker.context.stream_address, None)
    ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    stream.mux.open(
        decode_pb2.DecodeRequest(worker_incarnation=b"another").SerializeToString()
    ).on_end = ended.set_result
    assert isinstance(from_proto(status_pb2.Status.FromString(await ended)), Incompatible)
    await asyncio.sleep(0.5)  # reports come several times a second
    assert notes == []
    assert stream.ended is None
    stream.end()
    await pool.close()
