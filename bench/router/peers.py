"""Tandem's router beside sglang-router and vllm-router, both `cache_aware`: a real trace over four simulated workers.

All have the same arrivals, prefixes, cache sizes and prefill speed; each uses its own transport, HTTP or gRPC. Every
worker computes prompts and decodes only the first token. Sides take turns; every run begins with cold caches.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import track

from bench.models import SIM_VOCAB
from bench.report import Bar, percentile
from bench.router.peer_workers import BLOCK_TOKENS, MODEL, NUM_BLOCKS, PREFILL_TOKENS_PER_S
from bench.router.site import first_line, free_port, process, sim_site
from bench.router.trace import Arrival, read_arrivals, text, token_ids
from protos import inference_pb2 as pb
from tandem.client import Client

WORKERS = 4
REQUESTS = 3000
SPEED = 20.0
ROUNDS = 3
CHUNK_TOKENS = 256
"""Chunk of chunked prefill: a prompt's first token comes with the end of a chunk."""
VENV = Path(".venv-routers/bin")
MAX_MEAN, MAX_P99 = 0.85, 0.9

Ask = Callable[[Arrival], Awaitable[int]]
"""Request that returns, at its first token, the number of cached prompt tokens."""


async def replay(ask: Ask, arrivals: Sequence[Arrival]) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    ttft: list[float] = []
    cached: list[int] = []

    async def one(arrival: Arrival) -> None:
        started_at = time.monotonic()
        cached.append(await ask(arrival))
        ttft.append(time.monotonic() - started_at)

    running, started_at = [], loop.time() - arrivals[0].at_s
    for arrival in arrivals:
        await asyncio.sleep(started_at + arrival.at_s - loop.time())
        running.append(asyncio.ensure_future(one(arrival)))
    await asyncio.gather(*running)
    return {
        "ttft_mean_ms": 1e3 * mean(ttft),
        "ttft_p50_ms": 1e3 * percentile(ttft, 0.5),
        "ttft_p99_ms": 1e3 * percentile(ttft, 0.99),
        "hit_rate": sum(cached) / sum(arrival.num_tokens for arrival in arrivals),
    }


@contextlib.asynccontextmanager
async def tandem() -> AsyncIterator[Ask]:
    worker = {
        "block_tokens": BLOCK_TOKENS,
        "kv_memory_mib": NUM_BLOCKS * 8 // 1024,  # a block of 64 tokens has 8 KiB
        "sim_prompt_token_us": 1e6 / PREFILL_TOKENS_PER_S,
        "sim_reads": "last",
        "max_prefill_tokens": CHUNK_TOKENS,
    }
    async with sim_site({}, prefill=0, decode=WORKERS, worker=worker) as site, Client(site.router.address) as client:
        sampling = pb.Sampling(max_tokens=1)

        async def ask(arrival: Arrival) -> int:
            cached = 0
            async for message in client.generate(
                token_ids=token_ids(arrival, BLOCK_TOKENS, SIM_VOCAB), sampling=sampling, timeout_s=120
            ):
                cached = message.finish.usage.cached_tokens
            return cached

        yield ask


@contextlib.asynccontextmanager
async def peer(*router: str) -> AsyncIterator[Ask]:
    """Start a router that speaks HTTP, over workers that do."""
    async with contextlib.AsyncExitStack() as stack:
        workers = await stack.enter_async_context(process(sys.executable, "-m", PEERS, str(WORKERS)))
        urls = [f"http://127.0.0.1:{port}" for port in (await first_line(workers)).split()]
        port, metrics = free_port(), free_port()
        options = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--log-level", "error"]
        options += ["--prometheus-port", str(metrics), "--worker-urls", *urls]
        await stack.enter_async_context(process(*router, *options, stderr=asyncio.subprocess.DEVNULL))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=aiohttp.TCPConnector(limit=0))
        )

        async def ask(arrival: Arrival) -> int:
            body = {"model": MODEL, "prompt": text(arrival, BLOCK_TOKENS), "max_tokens": 1, "stream": True}
            async with session.post("/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        cached: int = json.loads(line[6:])["usage"]["cached_tokens"]
                        return cached
            raise AssertionError("a stream without a token")

        await _until_ready(ask)
        yield ask


PEERS = "bench.router.peer_workers"
SYSTEMS: dict[str, Callable[[], contextlib.AbstractAsyncContextManager[Ask]]] = {
    "tandem": tandem,
    "sglang-router": lambda: peer(str(VENV / "python"), "-m", "sglang_router.launch_router"),
    "vllm-router": lambda: peer(str(VENV / "vllm-router")),
}


async def _until_ready(ask: Ask) -> None:
    give_up_at = time.monotonic() + 60
    while True:
        try:
            await ask(Arrival(0.0, 8, (99999999,)))
            return
        except aiohttp.ClientError:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(0.2)


async def compare(console: Console) -> dict[str, Any]:
    arrivals = read_arrivals(REQUESTS, SPEED, BLOCK_TOKENS)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
    turns = [name for _ in range(ROUNDS) for name in SYSTEMS]
    for name in track(turns, "routers side by side", console=console):
        async with SYSTEMS[name]() as ask:
            runs[name].append(await replay(ask, arrivals))
    figures: dict[str, Any] = {
        name: {figure: median(run[figure] for run in each) for figure in each[0]} for name, each in runs.items()
    }
    return figures | {"runs": runs}


def measure(console: Console) -> tuple[list[Bar], dict[str, Any]]:
    figures = uvloop.run(compare(console))
    bars = []
    for figure, limit in (("ttft_mean_ms", MAX_MEAN), ("ttft_p99_ms", MAX_P99)):
        better = min(figures[name][figure] for name in SYSTEMS if name != "tandem")
        ratio = figures["tandem"][figure] / better
        bars.append(Bar(f"conversation trace, {figure.removesuffix('_ms')} / the better of the others", ratio, limit))
    return bars, figures
