"""Latency and throughput of the gRPC and HTTP frontends, beside bare proxies of the same hops and message sizes.

The bare proxies are gRPC in front of gRPC, and HTTP in front of gRPC; at saturation also HTTP in front of HTTP.

Measured are the added latency of a first token with 100, 1,000 and 3,000 streams in flight, all sides at the same rates
of requests and tokens, in turns; and requests per second at saturation. `python -m bench.api [--quick]`: fewer streams,
to try it out.
"""

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from bench.bare_api import METHOD, WAITED
from bench.models import SIM_VOCAB
from bench.report import Bar, conclude, of_rounds
from bench.router.site import first_line, process, sim_site
from cluster.rpc import channel
from protos import inference_pb2 as pb

ROUNDS_OF = {100: 4, 1000: 1, 3000: 1}
"""Rounds by number of streams. The machine's speed changes within seconds, so short streams take turns more often."""
TOKENS = 30
TOKENS_PER_S = 3000.0
"""Tokens per second of all streams together: more streams are each slower."""
WINDOW_S = 10.0
"""Seconds of a round."""
PROMPT_TOKENS = 16
WARM_ROUNDS, WARM_STREAMS = 3, 32
SATURATING = 96
SATURATION_TOKENS = 4
SATURATION_S = 6.0
ROUNDS = 2
LEAST = 0.5
KINDS = ("grpc", "http")
HTTP_ALONE = "HTTP, bare, in front of HTTP"

Ask = Callable[[], Awaitable[float]]
"""Complete request that returns the seconds added to its first token."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Request functions by the name of their side."""

    asks: dict[str, Ask]
    references: dict[str, Ask]


@contextlib.asynccontextmanager
async def bare(role: str, *arguments: str) -> AsyncIterator[str]:
    """Run `bench.bare_api` in a process and yield its address."""
    async with process(sys.executable, "-m", "bench.bare_api", role, *arguments) as started:
        yield await first_line(started)


@contextlib.asynccontextmanager
async def sides(step_s: float, num_tokens: int, receipts: bool = True) -> AsyncIterator[Sides]:
    """Start all sides.

    `receipts`: ask Tandem's HTTP frontend for a receipt, which tells the engine's time but is longer than all events of
    a few tokens. Bare proxies send nothing like it.
    """
    many = {"max_batch_tokens": 16384, "max_prefill_tokens": 16384, "kv_memory_mib": 512, "sim_reads": "last"}
    async with contextlib.AsyncExitStack() as stack:
        site = await stack.enter_async_context(
            sim_site({"http_port": 0}, prefill=0, decode=2, decode_worker={"sim_step_ms": step_s * 1e3} | many)
        )
        to_router = await stack.enter_async_context(channel(site.router.address))
        load = (str(step_s), str(num_tokens))
        grpc_source, http_source = [await stack.enter_async_context(bare(f"{kind}-source", *load)) for kind in KINDS]
        grpc_proxy = await stack.enter_async_context(bare("grpc-proxy", *load, grpc_source))
        http_to_grpc = await stack.enter_async_context(bare("http-to-grpc-proxy", *load, grpc_source))
        http_proxy = await stack.enter_async_context(bare("http-proxy", *load, http_source))
        to_proxy = await stack.enter_async_context(channel(grpc_proxy))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600))
        )
        yield Sides(
            {
                "gRPC": tandem_grpc(to_router, num_tokens),
                "gRPC, bare": grpc_bare(to_proxy),
                "HTTP": tandem_http(session, f"http://{site.router.http_address}", num_tokens, receipts),
                "HTTP, bare": http_bare(session, f"http://{http_to_grpc}"),
            },
            {HTTP_ALONE: http_bare(session, f"http://{http_proxy}")},
        )


def computed_s(receipt: pb.Receipt) -> float:
    """Return the wait for the running step plus the request's own first step, in seconds."""
    return sum(stage.duration_ms for stage in receipt.stages if stage.name in ("decode queue", "prompt tail")) / 1e3


def prompt() -> list[int]:
    return [random.randrange(SIM_VOCAB) for _ in range(PROMPT_TOKENS)]


def tandem_grpc(link: Any, num_tokens: int) -> Ask:
    call = link.unary_stream("/tandem.v1.Inference/Generate", request_serializer=pb.GenerateRequest.SerializeToString)
    sampling = pb.Sampling(max_tokens=num_tokens, temperature=0)

    async def ask() -> float:
        began_at, first_s, last = time.monotonic(), 0.0, b""
        async for message in call(pb.GenerateRequest(token_ids=prompt(), sampling=sampling), timeout=600):
            first_s = first_s or time.monotonic() - began_at
            last = message
        return first_s - computed_s(pb.GenerateResponse.FromString(last).finish.receipt)

    return ask


def grpc_bare(link: Any) -> Ask:
    call = link.unary_stream(METHOD)

    async def ask() -> float:
        began_at, added = time.monotonic(), 0.0
        async for message in call(b"q" * 80, timeout=600):
            if not added:
                added = time.monotonic() - began_at - WAITED.unpack_from(message)[0]
        return added

    return ask


def tandem_http(session: aiohttp.ClientSession, url: str, num_tokens: int, receipts: bool) -> Ask:
    """Return a request function.

    Without receipts its result has no meaning.
    """
    body: dict[str, Any] = {"model": "sim", "max_tokens": num_tokens, "temperature": 0, "stream": True}
    body["receipt"] = receipts

    async def ask() -> float:
        began_at, first_s, receipt = time.monotonic(), 0.0, pb.Receipt()
        async with session.post(f"{url}/v1/completions", json=body | {"prompt": prompt()}) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                first_s = first_s or time.monotonic() - began_at
                if b'"tandem":' in line:
                    for stage in json.loads(line[6:])["tandem"]["stages"]:
                        receipt.stages.add(name=stage["name"], duration_ms=stage["duration_ms"])
        return first_s - computed_s(receipt)

    return ask


def http_bare(session: aiohttp.ClientSession, url: str) -> Ask:
    async def ask() -> float:
        began_at, added = time.monotonic(), 0.0
        async with session.post(f"{url}/", json={"prompt": prompt()}) as answer:
            async for line in answer.content:
                if not added:
                    added = time.monotonic() - began_at - float(line[2:])
        return added

    return ask


async def hold(ask: Ask, streams: int, lifetime_s: float) -> list[float]:
    """Keep `streams` requests in flight and return the added latencies of those that begin within the window.

    They begin spread over a lifetime.
    """
    loop, added = asyncio.get_running_loop(), list[float]()
    began_at = loop.time()
    counts_from, ends_at = began_at + lifetime_s, began_at + lifetime_s + WINDOW_S

    async def one(number: int) -> None:
        await asyncio.sleep(lifetime_s * number / streams)
        while (now := loop.time()) < ends_at:
            took = await ask()
            if now >= counts_from:
                added.append(took)

    await asyncio.gather(*(one(number) for number in range(streams)))
    return added


async def warm_up(ask: Ask) -> None:
    """Open connections and let the router learn the workers' rates."""
    for _ in range(WARM_ROUNDS):
        await asyncio.gather(*(ask() for _ in range(WARM_STREAMS)))


async def saturate(ask: Ask) -> float:
    """Return requests per second at saturation."""
    loop, done = asyncio.get_running_loop(), 0
    ends_at = loop.time() + SATURATION_S

    async def one() -> None:
        nonlocal done
        while loop.time() < ends_at:
            await ask()
            done += 1

    began_at = loop.time()
    await asyncio.gather(*(one() for _ in range(SATURATING)))
    return done / (loop.time() - began_at)


async def measure(progress: Progress, levels: tuple[int, ...]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    task = progress.add_task("front doors", total=4 * sum(ROUNDS_OF[streams] for streams in levels) + 5 * ROUNDS)
    for streams in levels:
        step_s = streams / TOKENS_PER_S
        added: dict[str, list[list[float]]] = {}
        async with sides(step_s, TOKENS) as found:
            await asyncio.gather(*(warm_up(ask) for ask in found.asks.values()))
            for _ in range(ROUNDS_OF[streams]):
                for name, ask in found.asks.items():
                    added.setdefault(name, []).append(await hold(ask, streams, TOKENS * step_s))
                    progress.advance(task)
        figures[f"{streams} streams"] = {
            name: {
                "p50_ms": 1e3 * of_rounds(rounds, 0.5),
                "p99_ms": 1e3 * of_rounds(rounds, 0.99),
                "requests": sum(map(len, rounds)),
            }
            for name, rounds in added.items()
        }
    async with sides(0.0, SATURATION_TOKENS, receipts=False) as found:
        asks = found.asks | found.references
        rates: dict[str, list[float]] = {name: [] for name in asks}
        for _ in range(ROUNDS):
            for name, ask in asks.items():
                rates[name].append(await saturate(ask))
                progress.advance(task)
    figures["requests/s at saturation"] = {name: max(values) for name, values in rates.items()}
    return figures


def main() -> None:
    console, quick = Console(), "--quick" in sys.argv
    levels = tuple(ROUNDS_OF)[:1] if quick else tuple(ROUNDS_OF)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        figures = uvloop.run(measure(progress, levels))
    console.print_json(data=figures)
    bars = []
    for frontend in ("gRPC", "HTTP"):
        for streams in levels:
            held = figures[f"{streams} streams"]
            for share in ("p50_ms", "p99_ms"):
                ratio = held[f"{frontend}, bare"][share] / held[frontend][share]
                bars.append(
                    Bar(
                        f"{frontend}, {streams} streams, {share[:3]}: the bare proxy's added latency / ours",
                        ratio,
                        LEAST,
                        True,
                    )
                )
        rates = figures["requests/s at saturation"]
        ratio = rates[frontend] / rates[f"{frontend}, bare"]
        bars.append(Bar(f"{frontend}: requests/s at saturation / the bare proxy's", ratio, LEAST, True))
    conclude("api", bars, figures, console)


if __name__ == "__main__":
    main()
