"""CPU time that the router spends on a token of 5,000 concurrent streams, beside a bare grpc.aio proxy of bytes.

One client opens all streams on either side, in turns; some of its readers pause. Then fewer streams get several times
more tokens than router and client can pass on singly. These tokens must be merged into messages, and none may be lost.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import Progress, TaskID, TimeElapsedColumn

from bench.models import SIM_VOCAB
from bench.router.bare_streams import METHOD, NUM_TOKENS, REQUEST, STEP_S
from bench.router.site import Site, bare, cpu_seconds, sim_site
from bench.serving import peak_memory_mib
from bench.support.report import Bar
from cluster.network.rpc import channel
from protos import inference_pb2 as pb

STREAMS = 5000
OPEN_PER_S = 250.0
ROUNDS = 2
SLOW_EVERY = 25
"""Every so many-th reader pauses after its first token."""
PAUSE_S = 12.0
WINDOW_S = 15.0
"""Seconds in which all streams run, and CPU and tokens are counted."""
PROMPT_TOKENS = 16
PRESSED_STREAMS = 1000
PRESSED_TOKENS = 800
PRESSED_STEP_S = 0.01
MAX_CPU = 1.3
MAX_MEMORY_MIB = 1024.0

OpenStream = Callable[[], AsyncIterator[int]]
"""New stream, which yields the number of tokens in each message."""


@dataclass(slots=True)
class Counted:
    tokens: int = 0
    messages: int = 0
    complete: int = 0
    """Streams that delivered all their tokens."""


async def one_stream(open_stream: OpenStream, pauses: bool, counted: Counted, expected: int = NUM_TOKENS) -> None:
    received = 0
    async for num_tokens in open_stream():
        received += num_tokens
        counted.tokens += num_tokens
        counted.messages += 1
        if pauses and received == num_tokens:
            await asyncio.sleep(PAUSE_S)
    counted.complete += received == expected


async def one_round(open_stream: OpenStream, pid: int, tick: Callable[[int], object]) -> dict[str, float]:
    """Run one round through the process `pid` and return its figures."""
    counted, loop, streams = Counted(), asyncio.get_running_loop(), []
    started_at = loop.time()
    for number in range(STREAMS):
        await asyncio.sleep(started_at + number / OPEN_PER_S - loop.time())
        pauses = number % SLOW_EVERY == 0
        streams.append(asyncio.ensure_future(one_stream(open_stream, pauses, counted)))
        if number % 100 == 99:
            tick(100)
    await asyncio.sleep(2 * STEP_S)
    cpu, tokens, messages = cpu_seconds(pid), counted.tokens, counted.messages
    await asyncio.sleep(WINDOW_S)
    running = sum(not stream.done() for stream in streams)
    cpu, tokens, messages = cpu_seconds(pid) - cpu, counted.tokens - tokens, counted.messages - messages
    await asyncio.gather(*streams)
    return {
        "running": running,
        "complete": counted.complete,
        "cpu_us_per_token": 1e6 * cpu / tokens,
        "tokens_per_s": tokens / WINDOW_S,
        "tokens_per_message": tokens / messages,
    }


def tandem_stream(link: Any, max_tokens: int = NUM_TOKENS) -> OpenStream:
    call = link.unary_stream("/tandem.v1.Inference/Generate", request_serializer=pb.GenerateRequest.SerializeToString)
    sampling = pb.Sampling(max_tokens=max_tokens, temperature=0)

    async def open_stream() -> AsyncIterator[int]:
        prompt = [random.randrange(SIM_VOCAB) for _ in range(PROMPT_TOKENS)]
        async for message in call(pb.GenerateRequest(token_ids=prompt, sampling=sampling), timeout=300):
            yield len(pb.GenerateResponse.FromString(message).token_ids)

    return open_stream


def bare_stream(link: Any) -> OpenStream:
    call = link.unary_stream(METHOD)

    async def open_stream() -> AsyncIterator[int]:
        async for message in call(REQUEST, timeout=300):
            yield len(message[:1])

    return open_stream


async def compare(progress: Progress, task: TaskID) -> dict[str, Any]:
    figures: dict[str, Any] = {"tandem": [], "bare": []}
    async with contextlib.AsyncExitStack() as stack:
        site = await stack.enter_async_context(workers_of(STEP_S))
        source = await stack.enter_async_context(bare("source", module="bench.router.bare_streams"))
        proxy = await stack.enter_async_context(bare("proxy", source.address, module="bench.router.bare_streams"))
        to_router = await stack.enter_async_context(channel(site.router.address))
        to_proxy = await stack.enter_async_context(channel(proxy.address))
        for _ in range(ROUNDS):
            for name, stream, pid in (
                ("tandem", tandem_stream(to_router), site.router.pid),
                ("bare", bare_stream(to_proxy), proxy.pid),
            ):
                figures[name].append(await one_round(stream, pid, lambda n: progress.advance(task, n)))
        figures["router_peak_mib"] = peak_memory_mib(site.router.pid)
        figures["proxy_peak_mib"] = peak_memory_mib(proxy.pid)
    return figures


def workers_of(step_s: float) -> contextlib.AbstractAsyncContextManager[Site]:
    many = {"max_batch_tokens": 16384, "max_prefill_tokens": 16384, "kv_memory_mib": 512, "reserve_output_tokens": 1024}
    decode = {"sim_step_ms": step_s * 1e3, "sim_reads": "last"} | many
    return sim_site({}, prefill=0, decode=2, decode_worker=decode)


async def press() -> dict[str, float]:
    """Send more tokens than can be passed on one by one."""
    async with workers_of(PRESSED_STEP_S) as site, channel(site.router.address) as link:
        counted, started_at = Counted(), time.monotonic()
        stream = tandem_stream(link, PRESSED_TOKENS)
        await asyncio.gather(*(one_stream(stream, False, counted, PRESSED_TOKENS) for _ in range(PRESSED_STREAMS)))
        return {
            "streams": PRESSED_STREAMS,
            "complete": counted.complete,
            "tokens_per_s": counted.tokens / (time.monotonic() - started_at),
            "tokens_per_message": counted.tokens / counted.messages,
            "router_peak_mib": peak_memory_mib(site.router.pid),
        }


def measure(console: Console) -> tuple[list[Bar], dict[str, Any]]:
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(f"{STREAMS} streams", total=2 * ROUNDS * STREAMS)
        figures = uvloop.run(compare(progress, task))
        figures["pressed"] = uvloop.run(press())
    spent = {name: min(each["cpu_us_per_token"] for each in figures[name]) for name in ("tandem", "bare")}
    dropped = sum(2 * STREAMS - each["complete"] - each["running"] for each in figures["tandem"])
    pressed = figures["pressed"]
    peak = max(figures["router_peak_mib"], pressed["router_peak_mib"])
    bars = [
        Bar(f"router CPU per token, {STREAMS} streams / a bare byte proxy's", spent["tandem"] / spent["bare"], MAX_CPU),
        Bar("the same: streams that ended early or lost a token", dropped, 0),
        Bar("streams under pressure that lost a token", pressed["streams"] - pressed["complete"], 0),
        Bar("peak memory of the router in all of this, MiB", peak, MAX_MEMORY_MIB),
    ]
    return bars, figures
