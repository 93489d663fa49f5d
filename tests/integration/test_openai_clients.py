"""What clients of the HTTP API can do to it: leave, read slowly, send too much; and a router that stops."""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.openai_http import RawConnection, call, http_cluster
from support.processes import report_of, until
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
VOCAB = 600
SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 1.0, "kv_memory_mib": 64}
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
    report = await report_of(cluster.decode[0].address)
    num_requests: int = report.requests
    return num_requests


async def test_a_client_that_reads_slowly_costs_little_and_holds_up_nobody(cluster: LocalCluster) -> None:
    """Chunks of 19,200 tokens, each with a long id, would be 8 MB. Meanwhile a quick client is served."""
    address, pid = cluster.router.http_address, cluster.router.pid
    body = asking(8, 1200, n=16, request_id="x" * 250)
    expected = (await asyncio.to_thread(call, address, PATHS[0], body))[2]
    before = rss_bytes(pid)
    with closing(RawConnection(address, receive_bytes=4096)) as slow:
        await asyncio.to_thread(slow.post, PATHS[0], body | {"stream": True})
        while True:
            status, _, _ = await asyncio.to_thread(call, address, PATHS[0], asking(9, 5))
            assert status == 200
            if not await _num_requests(cluster):
                break
        assert rss_bytes(pid) - before < 4 << 20
        status, stream = await asyncio.to_thread(slow.answer)
    assert status == 200
    events = stream.decode().split("data: ")[1:]
    assert events[-1].strip() == "[DONE]"
    texts = [""] * 16
    for event in events[:-1]:
        choice = json.loads(event)["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in expected["choices"]]


@pytest.mark.parametrize(
    ("status", "code", "head", "rest"),
    [
        (413, "request_too_large", b"content-length: 17000000", b""),
        (
            413,
            "request_too_large",
            b"transfer-encoding: chunked",
            b"400000\r\n" + b" " * (1 << 22) + b"\r\n1\r\n \r\n",
        ),
        (431, "headers_too_large", b"x: " + b"y" * 70_000, b""),
        (400, "bad_request", b"no colon", b""),
    ],
)
async def test_what_is_too_large_is_not_read(
    cluster: LocalCluster, status: int, code: str, head: bytes, rest: bytes
) -> None:
    with closing(RawConnection(cluster.router.http_address)) as connection:
        content = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n" + rest
        await asyncio.to_thread(connection.send, content)
        got, body = await asyncio.to_thread(connection.answer)
    assert (got, json.loads(body)["error"]["code"]) == (status, code)


async def test_a_router_that_stops_says_so_in_the_stream(sim_model: Callable[..., Path]) -> None:
    settings_of_router = {"drain_s": 0.3}
    async with http_cluster(sim_model(VOCAB, speaks=True), router=settings_of_router, **SIM) as cluster:
        address = cluster.router.http_address
        with closing(RawConnection(address)) as long:
            await asyncio.to_thread(long.post, PATHS[0], asking(1, 5000, stream=True))
            await asyncio.to_thread(long.peek)
            cluster.router.process.send_signal(signal.SIGTERM)
            ready: tuple[int, dict[str, str], Any] = 200, {}, None

            async def draining() -> bool:
                nonlocal ready
                ready = await asyncio.to_thread(call, address, "/ready")
                return ready[0] == 503

            await until(draining, "it drains")
            with closing(RawConnection(address)) as short:
                await asyncio.to_thread(short.post, PATHS[0], asking(2, 5))
                answered = await asyncio.to_thread(short.answer)
                assert answered[0] == 503
                assert not await asyncio.to_thread(short.peek), "a retry goes to another router"
            refused = await asyncio.to_thread(call, address, PATHS[0], asking(2, 5))
            status, stream = await asyncio.to_thread(long.answer)
        assert ready[2]["status"] == "draining"
        assert (refused[0], refused[1]["retry-after"]) == (503, "1")
        assert status == 200
        last = stream.decode().split("data: ")[-1]
        assert json.loads(last)["error"]["code"] == "unavailable"
        assert await asyncio.wait_for(cluster.router.process.wait(), 10) == 0
