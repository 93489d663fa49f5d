"""Connections of routers to workers, and their ends."""

import logging
from pathlib import Path
from typing import Any

import pytest

from engine.config import WorkerConfig
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
