"""What clients of the HTTP API can do to it: leave, read slowly, send what is none; and a router that stops."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.openai_http import RawConnection, call, http_cluster
from support.processes import until
from tandem.client import Client
from tandem.local import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
VOCAB = 600
SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 4.0, "kv_memory_mib": 16}
PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(sim_model: Callable[..., Path]) -> AsyncIterator[LocalCluster]:
    async with http_cluster(sim_model(VOCAB, speaks=True), **SIM) as started:
        yield started


def prompt_of(seed: int, count: int = 60) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def asking(seed: int, max_tokens: int, **options: Any) -> dict[str, Any]:
    return {"prompt": prompt_of(seed), "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0} | options


def rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_blocks(cluster: LocalCluster, audit: Any, stream: bool) -> None:
    """Three prompts with two choices each are a request for each prompt."""
    body = asking(1, 5000, stream=stream, n=2) | {"prompt": [prompt_of(seed) for seed in (1, 2, 3)]}
    with closing(RawConnection(cluster.router.http_address)) as connection:
        await asyncio.to_thread(connection.post, PATHS[0], body)
        if stream:
            assert (await asyncio.to_thread(connection.read, 100)).startswith(b"HTTP/1.1 200")
        async with Client(cluster.address) as client:

            async def under_way() -> bool:
                return (await _num_requests(cluster)) == 3

            await until(under_way, "all three are generated")
            assert await client.list_models()
    await audit([worker.address for worker in cluster.workers])


async def _num_requests(cluster: LocalCluster) -> int:
    from support.processes import report_of

    report = await report_of(cluster.decode[0].address)
    num_requests: int = report.requests
    return num_requests


async def test_a_client_that_reads_slowly_costs_little_and_holds_up_nobody(cluster: LocalCluster) -> None:
    """Its answer has 30 MB, of which the router must hold next to nothing while it does not read."""
    address, pid = cluster.router.http_address, cluster.router.pid
    await asyncio.to_thread(call, address, PATHS[0], asking(7, 5))
    before = rss_bytes(pid)
    body = asking(8, 4000, logprobs=20, stream=True, n=4)
    with closing(RawConnection(address, receive_bytes=4096)) as slow:
        await asyncio.to_thread(slow.post, PATHS[0], body)
        times = []
        while (await _num_requests(cluster)) == 1 and sum(times) < 20:
            asked_at = time.monotonic()
            status, _, _ = await asyncio.to_thread(call, address, PATHS[0], asking(9, 5))
            times.append(time.monotonic() - asked_at)
            assert status == 200
        assert max(times) < 2.0
        assert rss_bytes(pid) - before < 12 << 20
        events = (await asyncio.to_thread(_rest_of_stream, slow)).split("data: ")[1:]
    assert events[-1].startswith("[DONE]")
    assert rss_bytes(pid) - before < 12 << 20
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"]) == 16_000
    assert sum(len(event) for event in events) > 10 << 20


def _rest_of_stream(connection: RawConnection) -> str:
    parts = [connection.read(1 << 20)]
    while not parts[-1].endswith(b"0\r\n\r\n"):
        parts.append(connection.read(1 << 20))
        assert parts[-1], "it ends with the last chunk"
    return b"".join(parts).decode()
