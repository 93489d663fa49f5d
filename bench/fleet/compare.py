"""Routers over the same stock servers, in turns: time to first token and hit rate of a conversation trace."""

import asyncio
import contextlib
import os
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from bench.compare.http_wire import MODEL_NAME, HttpClient, HttpReply
from bench.compare.routers import ROUTERS, CannotRun
from bench.fleet.servers import StockServer, stock_servers, tiny_model
from bench.fleet.workload import Arrival, conversations
from bench.router.site import cpu_seconds, free_port, process
from bench.support.report import Bar, percentile
from cluster.process.tree import descendants
from router.config import RouterConfig
from tandem.local.local_cluster import start_role, stop_process

TRACE = Path(os.environ.get("TANDEM_TRACES", "../shared/traces")) / "conversation_trace.jsonl"
SERVERS, NUM_BLOCKS = 8, 1500
TIMING = {"NULL_STEP_MS": "8", "NULL_PREFILL_US": "250"}
"""A prompt token of the trace's size stands for 16: 64,000 of them a second, as an H100 computes of a model of 8 B."""
RATE, ROUND_S, ROUNDS = 20.0, 45.0, 3
READY_S = 60.0


class Site:
    """A running router: its port, and the root of its processes."""

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self._pid = pid

    def cpu_s(self) -> float:
        return cpu_seconds(self._pid, *descendants(self._pid))


@contextlib.asynccontextmanager
async def tandem(servers: Sequence[StockServer]) -> AsyncIterator[Site]:
    port = free_port()
    fleet = {"servers": [server.entry for server in servers], "model": tiny_model(), "name": MODEL_NAME}
    config = RouterConfig.parse({"fleet": fleet, "port": 0, "http_port": port})
    router = await start_role("router", "router", config)
    try:
        await _answers(port, servers)
        yield Site(port, router.pid)
    finally:
        await stop_process(router.process)


@contextlib.asynccontextmanager
async def in_rust(servers: Sequence[StockServer], *command: str) -> AsyncIterator[Site]:
    if not ROUTERS.exists():
        raise CannotRun(f"{ROUTERS.name} is not installed")
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--log-level", "error"]
    options += ["--prometheus-port", str(free_port()), "--worker-urls", *(server.url for server in servers)]
    async with process(*command, *options, stderr=asyncio.subprocess.DEVNULL) as started:
        await _answers(port, servers)
        yield Site(port, started.pid)


async def _answers(port: int, servers: Sequence[StockServer]) -> None:
    """Wait until a router answers, and has had time to meet all servers; then drop what the question cached."""
    body = {"model": MODEL_NAME, "prompt": "w5 w6", "max_tokens": 2}
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
                    if answer.status == 200:
                        break
            await asyncio.sleep(0.25)
    await asyncio.sleep(3.0)


Start = Callable[[Sequence[StockServer]], AbstractAsyncContextManager[Site]]
SITES: Mapping[str, Start] = {
    "Tandem": tandem,
    "vllm-router": lambda servers: in_rust(servers, str(ROUTERS / "bin/vllm-router")),
    "sglang-router": lambda servers: in_rust(servers, str(ROUTERS / "bin/python"), "-m", "sglang_router.launch_router"),
}


async def replayed(port: int, arrivals: Sequence[Arrival]) -> list[HttpReply]:
    """Send requests at their times and wait for all answers."""
    client, loop, running = HttpClient("127.0.0.1", port), asyncio.get_running_loop(), []
    prepared = [(each.at, each.bytes()) for each in arrivals]
    start = loop.time()
    for at, request in prepared:
        await asyncio.sleep(start + at - loop.time())
        running.append(asyncio.ensure_future(client.ask(request)))
    return list(await asyncio.gather(*running))


async def one_round(site: Site, servers: Sequence[StockServer], arrivals: Sequence[Arrival]) -> dict[str, float]:
    before = [await server.counters() for server in servers]
    cpu_s = site.cpu_s()
    answers = await replayed(site.port, arrivals)
    cpu_s = site.cpu_s() - cpu_s
    after = [await server.counters() for server in servers]
    queries, hits = (
        sum(new[name] - old[name] for new, old in zip(after, before, strict=True)) for name in ("queries", "hits")
    )
    for answer in answers:
        if answer.failure:
            print(answer.failure, file=sys.stderr)
    whole = [answer.ttft_s for answer in answers if not answer.failure]
    return {
        "mean_ttft_ms": 1e3 * statistics.fmean(whole),
        "p50_ttft_ms": 1e3 * percentile(whole, 0.5),
        "p99_ttft_ms": 1e3 * percentile(whole, 0.99),
        "hit_rate": hits / queries,
        "failed": len(answers) - len(whole),
        "cpu_ms": 1e3 * cpu_s / len(answers),
    }


async def compare(scratch: Path, console: Console) -> dict[str, Any]:
    """Measure each router over the same servers, in turns; every one begins with empty caches."""
    rounds: dict[str, list[dict[str, float]]] = {}
    cannot: dict[str, str] = {}
    async with stock_servers(SERVERS, scratch, NUM_BLOCKS, TIMING) as servers:
        for number in range(ROUNDS):
            arrivals = conversations(TRACE, RATE, ROUND_S, number)
            for name, start in SITES.items():
                if name in cannot:
                    continue
                await asyncio.gather(*(server.reset_cache() for server in servers))
                try:
                    async with start(servers) as site:
                        found = await one_round(site, servers, arrivals)
                except (CannotRun, TimeoutError) as error:
                    cannot[name] = f"{type(error).__name__}: {error}"
                    console.print(name, cannot[name], markup=False)
                    continue
                console.print(f"round {number}, {name}:", found)
                rounds.setdefault(name, []).append(found)
    medians = {
        name: {figure: statistics.median(each[figure] for each in found) for figure in found[0]}
        for name, found in rounds.items()
    }
    return {"medians": medians, "cannot run": cannot}


def compare_bars(figures: Mapping[str, Any]) -> list[Bar]:
    """Return the bars against the better router in Rust."""
    of = figures["medians"]
    others = [of[name] for name in ("vllm-router", "sglang-router") if name in of]
    if "Tandem" not in of or not others:
        return []
    ours, what = of["Tandem"], "8 stock servers, conversation trace, / the better router in Rust"

    def best(figure: str) -> float:
        return min(other[figure] for other in others)

    return [
        Bar(f"{what}: mean TTFT", ours["mean_ttft_ms"] / best("mean_ttft_ms"), 0.9),
        Bar(f"{what}: p99 TTFT", ours["p99_ttft_ms"] / best("p99_ttft_ms"), 0.95),
        Bar(f"{what}: hit rate", ours["hit_rate"] / max(other["hit_rate"] for other in others), 1.0, at_least=True),
    ]
