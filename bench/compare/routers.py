"""Routers alone, over mock engines of equal timing: CPU, added latency and memory."""

import asyncio
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from bench.compare.http_wire import MODEL_NAME, HttpClient, HttpReply
from bench.router.site import cpu_seconds, first_line, free_port, process
from bench.serving import peak_memory_mib
from bench.support.report import Bar, percentile
from cluster.process.tree import descendants
from router.config import RouterConfig
from tandem.local.local_cluster import start_role, stop_process

DYNAMO, ROUTERS = (Path(__file__).parents[2] / f".venv-{name}" for name in ("dynamo", "routers"))
ENGINES = 4
NUM_TOKENS, STEP_MS = 16, 20.0
RATES = (100.0, 300.0, 600.0)
ROUND_S = 8.0
STREAMS, STREAM_TOKENS, STREAM_STEP_MS, OPEN_PER_S = 5000, 12, 4000.0, 200.0
MIN_PER_CORE, MAX_P99_MS, MAX_TTFT_AT_600 = 0.5, 5.0, 1.5
ANSWERED_S = 120.0
"""Seconds for all answers of one rate."""


class CannotRun(Exception):
    """Reason why a router does not run here."""


@dataclass(frozen=True, slots=True)
class Site:
    """A running router: where it answers, and its processes."""

    host: str
    port: int
    roots: Sequence[int]

    def pids(self) -> list[int]:
        return [pid for root in self.roots for pid in (root, *descendants(root))]

    def cpu_s(self) -> float:
        return cpu_seconds(*self.pids())

    def memory_mib(self) -> float:
        return sum(peak_memory_mib(pid) for pid in self.pids())


@contextlib.asynccontextmanager
async def mock_engines(step_ms: float) -> AsyncIterator[list[str]]:
    async with process(sys.executable, "-m", "bench.compare.http_wire", str(ENGINES), str(step_ms)) as started:
        yield [f"http://127.0.0.1:{port}" for port in (await first_line(started)).split()]


@contextlib.asynccontextmanager
async def no_router(model: Path, step_ms: float) -> AsyncIterator[Site]:
    async with mock_engines(step_ms) as urls:
        yield Site("127.0.0.1", int(urls[0].rpartition(":")[2]), ())


@contextlib.asynccontextmanager
async def rust_router(model: Path, step_ms: float, *router: str) -> AsyncIterator[Site]:
    if not ROUTERS.exists():
        raise CannotRun(f"{ROUTERS.name} is not installed")
    async with mock_engines(step_ms) as urls:
        port = free_port()
        options = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--log-level", "error"]
        options += ["--prometheus-port", str(free_port()), "--worker-urls", *urls]
        async with process(*router, *options, stderr=asyncio.subprocess.DEVNULL) as started:
            await _until_served(port)
            yield Site("127.0.0.1", port, [started.pid])


@contextlib.asynccontextmanager
async def dynamo(model: Path, step_ms: float) -> AsyncIterator[Site]:
    """Start Dynamo's frontend over its own mocker, whose steps of few tokens last about as long."""
    if not DYNAMO.exists():
        raise CannotRun(f"{DYNAMO.name} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        python, port = str(DYNAMO / "bin/python"), free_port()
        command = ["env", f"DYN_FILE_KV={folder}", "HF_HUB_OFFLINE=1", python, "-m"]
        planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        frontend = [*command, "dynamo.frontend", "--http-port", str(port), "--router-mode", "kv"]
        mocker = [*command, "dynamo.mocker", "--model-path", str(model), "--model-name", MODEL_NAME]
        mocker += ["--num-workers", str(ENGINES), "--speedup-ratio", str(DYNAMO_STEP_MS / step_ms), *planes]
        quiet = {"stderr": asyncio.subprocess.DEVNULL}
        async with process(*frontend, *planes, **quiet) as started, process(*mocker, **quiet):
            await _until_served(port)
            yield Site("127.0.0.1", port, [started.pid])


DYNAMO_STEP_MS = 5.74
"""Decode step of Dynamo's mocker with few tokens."""


@contextlib.asynccontextmanager
async def tandem(model: Path, step_ms: float, num_routers: int = 1) -> AsyncIterator[Site]:
    """Start routers behind one port, each with mock engines of its own."""
    port = free_port()
    settings = {"model": model, "port": 0, "http_port": port, "http_port_shared": num_routers > 1}
    async with contextlib.AsyncExitStack() as stack:
        routers = []
        for number in range(num_routers):
            router = await start_role("router", f"router {number}", RouterConfig.parse(settings))
            stack.push_async_callback(stop_process, router.process)
            engines = [sys.executable, "-m", "bench.compare.mock_workers", str(model), router.address]
            await first_line(await stack.enter_async_context(process(*engines, str(ENGINES), str(step_ms))))
            routers.append(router.pid)
        await _until_served(port)
        yield Site("127.0.0.1", port, routers)


Start = Callable[[Path, float], AbstractAsyncContextManager[Site]]
SITES: dict[str, Start] = {
    "no router": no_router,
    "Tandem": tandem,
    "Tandem, two routers": lambda model, step_ms: tandem(model, step_ms, 2),
    "sglang-router": lambda model, step_ms: rust_router(
        model, step_ms, str(ROUTERS / "bin/python"), "-m", "sglang_router.launch_router"
    ),
    "vllm-router": lambda model, step_ms: rust_router(model, step_ms, str(ROUTERS / "bin/vllm-router")),
    "Dynamo": dynamo,
}


async def _until_served(port: int) -> None:
    body = {"model": MODEL_NAME, "prompt": "w5 w6", "max_tokens": 2}
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body | {"stream": True}) as got:
                    await got.read()
                    if got.status == 200:
                        return
            await asyncio.sleep(0.25)


async def offered(site: Site, rate: float, seconds: float, num_tokens: int, seed: int) -> list[HttpReply]:
    """Send requests at random times and wait for all answers."""
    seeds = random.Random(seed)
    moments = [at for at in accumulate(seeds.expovariate(rate) for _ in range(int(3 * rate * seconds))) if at < seconds]
    words = [[f"w{seeds.randrange(2, 4000)}" for _ in range(100)] for _ in moments]
    requests = [HttpClient.request(" ".join(prompt), num_tokens) for prompt in words]
    client, loop = HttpClient(site.host, site.port), asyncio.get_running_loop()
    start, running = loop.time(), []
    for moment, request in zip(moments, requests, strict=True):
        await asyncio.sleep(start + moment - loop.time())
        running.append(asyncio.ensure_future(client.ask(request)))
    async with asyncio.timeout(ANSWERED_S):
        return list(await asyncio.gather(*running))


async def at_rates(site: Site) -> dict[str, Any]:
    """Return CPU per request and TTFT at each rate."""
    figures: dict[str, Any] = {}
    await offered(site, RATES[0], 3.0, NUM_TOKENS, 0)  # warms up
    for rate in RATES:
        before_s = site.cpu_s()
        answers = await offered(site, rate, ROUND_S, NUM_TOKENS, int(rate))
        failed = [answer.failure for answer in answers if answer.failure]
        whole = [answer.ttft_s for answer in answers if not answer.failure]
        figures[f"{rate:g}/s"] = {
            "requests": len(answers),
            "failed": len(failed),
            "why": failed[0] if failed else "",
            "cpu_ms": 1e3 * (site.cpu_s() - before_s) / len(answers),
            "ttft_p50_ms": 1e3 * percentile(whole, 0.5),
            "ttft_p99_ms": 1e3 * percentile(whole, 0.99),
            "short": sum(answer.num_tokens < NUM_TOKENS for answer in answers if not answer.failure),
        }
    return figures


async def with_streams(site: Site) -> dict[str, Any]:
    """Return the peak memory with STREAMS streams at a time."""
    try:
        answers = await offered(site, OPEN_PER_S, STREAMS / OPEN_PER_S, STREAM_TOKENS, 1)
    except TimeoutError:
        return {"cannot run": f"not all answered within {ANSWERED_S:g} s", "memory_mib": site.memory_mib()}
    longest_s = max(answer.total_s for answer in answers)
    return {
        "streams": len(answers),
        "failed": sum(bool(answer.failure) for answer in answers),
        "memory_mib": site.memory_mib(),
        "longest_s": longest_s,
    }


async def measure(model: Path, console: Console) -> dict[str, Any]:
    """Measure every router in turn."""
    figures: dict[str, Any] = {"cannot run": {}}
    for name, start in SITES.items():
        try:
            async with start(model, STEP_MS) as site:
                found: dict[str, Any] = await at_rates(site)
            if site.roots:
                async with start(model, STREAM_STEP_MS) as site:
                    found["streams"] = await with_streams(site)
        except (CannotRun, TimeoutError) as error:
            figures["cannot run"][name] = f"{type(error).__name__}: {error}"
            console.print(name, error, markup=False)
            continue
        figures[name] = found
        console.print(name, json.dumps(found, indent=1))
    return figures


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars against the best router in Rust."""
    rust = [name for name in ("sglang-router", "vllm-router") if name in figures]
    if "Tandem" not in figures or not rust:
        return []
    at = "300/s"
    best_ms = min(figures[name][at]["cpu_ms"] for name in rust)
    best_p99_ms = min(figures[name][at]["ttft_p99_ms"] for name in rust)
    what = "router alone: requests per second of one core / the best router in Rust"
    bars = [Bar(what, best_ms / figures["Tandem"][at]["cpu_ms"], MIN_PER_CORE, at_least=True)]
    for name in [name for name in ("Tandem", "Tandem, two routers") if name in figures]:
        what = f"{name}: added p99 at 300 requests/s beyond the best router in Rust, ms"
        bars.append(Bar(what, figures[name][at]["ttft_p99_ms"] - best_p99_ms, MAX_P99_MS))
        what = f"{name}: TTFT p50 at 600 requests/s / at 300; one that falls behind has many times as much"
        bars.append(
            Bar(what, figures[name]["600/s"]["ttft_p50_ms"] / figures[name][at]["ttft_p50_ms"], MAX_TTFT_AT_600)
        )
    return bars
