"""One worker beside one server, and one prefill and one decode worker beside vLLM's own pair."""

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from bench.engine import Generate, Tandem, batch, interference, long_prompt, request
from bench.support.report import percentile
from bench.support.vllm_server import VllmServer
from bench.vllm.pair import VllmPair

VLLM = Path(".venv-vllm")
BLOCK = 32
STREAMS, PACED, PACED_PROMPT, PACED_OUTPUT, PACED_EVERY_S = 8, 12, 512, 32, 3.0


class Pausable(Protocol):
    """Side whose processes can be stopped."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@contextmanager
def quiet(side: Pausable) -> Iterator[None]:
    side.pause()
    try:
        yield
    finally:
        side.resume()


async def streams_itl(generate: Generate, seed: int) -> float:
    """Return the median inter-token latency of eight streams, in milliseconds."""
    done = await asyncio.gather(*(request(generate, 64, 96, seed + i) for i in range(STREAMS)))
    return 1e3 * statistics.median(b - a for timed in done for a, b in pairwise(timed.tokens[8:]))


async def throughput(generate: Generate, seed: int) -> float:
    return await batch(generate, 256, 64, seed)


async def paced(generate: Generate, seed: int) -> list[float]:
    """Return the times to first token, in ms, of requests that arrive at random times, at the same for both sides."""
    arrivals = random.Random(seed)
    asked = []
    for number in range(PACED):
        asked.append(asyncio.ensure_future(request(generate, PACED_PROMPT, PACED_OUTPUT, seed + number)))
        await asyncio.sleep(arrivals.expovariate(1 / PACED_EVERY_S))
    return [1e3 * timed.ttft for timed in await asyncio.gather(*asked)]


async def in_turns(
    ours: Generate, theirs: Generate, other: Pausable, work: Callable[[Generate, int], Awaitable[Any]], rounds: int
) -> dict[str, list[Any]]:
    """Run `work` on both sides in turns."""
    sides: dict[str, list[Any]] = {"vllm": [], "tandem": []}
    for number in range(rounds):
        sides["vllm"].append(await work(theirs, 1000 * number))
        with quiet(other):
            sides["tandem"].append(await work(ours, 1000 * number))
    return sides


async def compare_alone(model: Path, cores: Sequence[int], scratch: Path, console: Console) -> dict[str, Any]:
    """Compare one aggregated worker with `vllm serve`, both on all cores."""
    figures: dict[str, Any] = {}
    settings = {"engine": "vllm", "block_tokens": BLOCK}
    async with AsyncExitStack() as stack:
        server = VllmServer(VLLM, model, cores, scratch / "alone", "--block-size", str(BLOCK))
        vllm = await stack.enter_async_context(server)
        await batch(vllm.generate, 64, 8, 1)
        with quiet(vllm):
            tandem = await stack.enter_async_context(Tandem(model, cores, 0, **settings))
            await batch(tandem.generate, 64, 8, 1)
        workloads = {"tokens_per_s": throughput, "ttft_ms": long_prompt, "itl_ms": streams_itl}
        for name, work in workloads.items():
            sides = await in_turns(tandem.generate, vllm.generate, vllm, work, 3)
            figures[name] = {side: statistics.median(values) for side, values in sides.items()}
            console.print(f"one worker, {name}:", figures[name])
    return figures


@asynccontextmanager
async def both_pairs(model: Path, cores: Sequence[int], scratch: Path) -> AsyncIterator[tuple[Tandem, VllmPair]]:
    """Start one prefill and one decode worker on both sides, a core for each engine."""
    settings = {"engine": "vllm", "block_tokens": BLOCK}
    async with AsyncExitStack() as stack:
        vllm = await stack.enter_async_context(VllmPair(VLLM, model, cores, scratch))
        await batch(vllm.generate, 64, 8, 1)
        with quiet(vllm):
            tandem = await stack.enter_async_context(Tandem(model, cores, 1, **settings))
            await batch(tandem.generate, 64, 8, 1)
        yield tandem, vllm


async def compare_pairs(model: Path, cores: Sequence[int], scratch: Path, console: Console) -> dict[str, Any]:
    """Compare one prefill and one decode worker with vLLM's pair."""
    figures: dict[str, Any] = {}
    async with both_pairs(model, cores, scratch / "pair") as (tandem, vllm):
        sides = await in_turns(tandem.generate, vllm.generate, vllm, paced, 2)
        for share, name in ((0.5, "ttft_p50_ms"), (0.99, "ttft_p99_ms")):
            figures[name] = {
                side: statistics.median(percentile(each, share) for each in rounds) for side, rounds in sides.items()
            }
            console.print(f"pair, {name}:", figures[name])
        sides = await in_turns(tandem.generate, vllm.generate, vllm, throughput, 1)
        figures["tokens_per_s"] = {side: statistics.median(values) for side, values in sides.items()}
        console.print("pair, tokens_per_s:", figures["tokens_per_s"])
    return figures


async def compare_beside(model: Path, cores: Sequence[int], scratch: Path, console: Console) -> dict[str, Any]:
    """Compare streams beside long prompts on both pairs."""
    figures: dict[str, Any] = {}
    async with both_pairs(model, cores, scratch / "beside") as (tandem, vllm):
        sides = await in_turns(tandem.generate, vllm.generate, vllm, interference, 1)
        figures["itl_p99_ms"] = {side: rounds[0]["itl_p99"] for side, rounds in sides.items()}
        figures["beside"] = {
            side: {name: value for name, value in rounds[0].items() if name != "ttfts"}
            for side, rounds in sides.items()
        }
        console.print("pair, 8 streams beside long prompts:", figures["beside"])
    return figures
