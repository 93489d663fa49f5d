"""TandemConnector beside NixlConnector in the same stock vLLM, and beside vLLM without any connector.

All servers are started, and those of other sides are stopped while one is measured, in turns.
"""

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.engine import Generate, request
from bench.models import SMALL_LLAMA, llama
from bench.support.report import Bar
from bench.support.vllm_server import VllmServer
from bench.vllm.compared import BLOCK, VLLM, Pausable, quiet, streams_itl, throughput
from bench.vllm.pair import NIXL, TANDEM, VllmPair

LENGTHS, ROUNDS = (512, 4096), 7
STREAMS, STREAM_OUTPUT, BESIDE = 8, 160, 1024
CONTEXT = 8192


def of_small(generate: Generate) -> Generate:
    """Return `generate` with token ids that the small model has."""
    first, last = 100, SMALL_LLAMA["vocab_size"]

    def small(token_ids: Sequence[int], max_tokens: int) -> AsyncIterator[float]:
        return generate([first + token_id % (last - first) for token_id in token_ids], max_tokens)

    return small


def of_other_prompts(generate: Generate) -> Generate:
    """Return `generate` with prompts of its own: those of another side of the same servers are cached there."""

    def other(token_ids: Sequence[int], max_tokens: int) -> AsyncIterator[float]:
        return generate([token_id + 1 for token_id in token_ids], max_tokens)

    return other


async def ttft_of(generate: Generate, length: int, seed: int) -> float:
    """Return the time to first token of one prompt, in milliseconds."""
    return 1e3 * (await request(generate, length, 2, seed)).ttft


async def streams_beside(generate: Generate, seed: int) -> dict[str, float]:
    """Return figures of streams on a pair, beside prompts that come one after the other."""
    streams = [asyncio.ensure_future(request(generate, 64, STREAM_OUTPUT, seed + i)) for i in range(STREAMS)]
    ttfts, number = [], 0
    while not all(stream.done() for stream in streams):
        ttfts.append((await request(generate, BESIDE, 2, seed + 100 + number)).ttft)
        number += 1
    done = [await stream for stream in streams]
    gaps = [b - a for timed in done for a, b in pairwise(timed.tokens[4:])]
    began, ended = min(timed.tokens[0] for timed in done), max(timed.tokens[-1] for timed in done)
    return {
        "itl_ms": 1e3 * statistics.median(gaps),
        "tokens_per_s": sum(len(timed.tokens) for timed in done) / (ended - began),
        "beside_ttft_ms": 1e3 * statistics.median(ttfts),
    }


async def in_turns(
    sides: Mapping[str, tuple[Generate, Pausable]],
    everybody: Sequence[Pausable],
    work: Callable[[Generate, int], Awaitable[Any]],
    rounds: int,
) -> dict[str, list[Any]]:
    """Run `work` on all sides in turns, each while others' servers are stopped; the first round is dropped."""
    results: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, (generate, own) in sides.items():
            with ExitStack() as stack:
                for other in everybody:
                    if other is not own:
                        stack.enter_context(quiet(other))
                results[name].append(await work(generate, 1000 * number))
    return {name: values[1:] for name, values in results.items()}


async def compare_connectors(cores: Sequence[int], scratch: Path, console: Console) -> dict[str, Any]:
    """Compare a pair with TandemConnector with one with NixlConnector, a core for each server."""
    model = llama(scratch / "small", {**SMALL_LLAMA, "max_position_embeddings": CONTEXT}, "float32")
    options = ("--max-model-len", str(CONTEXT), "--dtype", "float32")
    figures: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        nixl = await stack.enter_async_context(VllmPair(VLLM, model, cores, scratch / "nixl", *options, connector=NIXL))
        nixl.pause()
        tandem = await stack.enter_async_context(
            VllmPair(VLLM, model, cores, scratch / "tandem", *options, connector=TANDEM)
        )
        nixl.resume()
        sides: dict[str, tuple[Generate, Pausable]] = {
            "nixl": (of_small(nixl.generate), nixl),
            "tandem": (of_small(tandem.generate), tandem),
            "alone": (of_other_prompts(of_small(tandem.generate_directly)), tandem),
        }
        for length in LENGTHS:

            async def work(generate: Generate, seed: int, length: int = length) -> float:
                return await ttft_of(generate, length, seed)

            values = await in_turns(sides, (nixl, tandem), work, ROUNDS)
            figures[f"ttft_{length}_ms"] = {name: statistics.median(each) for name, each in values.items()}
            console.print(f"connectors, TTFT of {length}:", figures[f"ttft_{length}_ms"], values)
        beside = await in_turns(sides, (nixl, tandem), streams_beside, 3)
        for figure in ("itl_ms", "tokens_per_s", "beside_ttft_ms"):
            figures[figure] = {
                name: statistics.median(each[figure] for each in rounds) for name, rounds in beside.items()
            }
            console.print(f"connectors, {figure}:", figures[figure])
    return figures


async def compare_idle(cores: Sequence[int], scratch: Path, console: Console) -> dict[str, Any]:
    """Compare one server that has the connector and nothing to borrow with one without it."""
    model = llama(scratch / "small", {**SMALL_LLAMA, "max_position_embeddings": CONTEXT}, "float32")
    options = ("--max-model-len", str(CONTEXT), "--dtype", "float32", "--block-size", str(BLOCK))
    transfer = {**TANDEM.transfer, "kv_connector_extra_config": {}}
    figures: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        without = await stack.enter_async_context(
            VllmServer(VLLM, model, cores, scratch / "without", *options, "--enable-prefix-caching", port=8797)
        )
        without.pause()
        server = VllmServer(
            VLLM,
            model,
            cores,
            scratch / "with",
            *(*options, "--enable-prefix-caching", "--kv-transfer-config", json.dumps(transfer)),
            port=8794,
        )
        having = await stack.enter_async_context(server)
        without.resume()
        sides: dict[str, tuple[Generate, Pausable]] = {
            "without": (of_small(without.generate), without),
            "with": (of_small(having.generate), having),
        }

        async def ttft(generate: Generate, seed: int) -> float:
            return await ttft_of(generate, 1024, seed)

        for name, work, rounds in (("ttft_ms", ttft, 9), ("itl_ms", streams_itl, 5), ("tokens_per_s", throughput, 5)):
            values = await in_turns(sides, (without, having), work, rounds)
            figures[name] = {side: statistics.median(each) for side, each in values.items()}
            console.print(f"with nothing to borrow, {name}:", figures[name], values)
    return figures


def connector_bars(figures: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of both comparisons, as far as they ran."""
    bars: list[Bar] = []
    if pair := figures.get("connectors"):
        for length in LENGTHS:
            of = pair[f"ttft_{length}_ms"]
            bars.append(
                Bar(f"stock pair, same proxy: TTFT of {length:,}, / NixlConnector", of["tandem"] / of["nixl"], 0.8)
            )
            bars.append(Bar(f"no proxy: TTFT of {length:,}, / NixlConnector", of["alone"] / of["nixl"], 0.8))
        of = pair["itl_ms"]
        bars.append(Bar("stock pair, 8 streams beside prompts: ITL, / NixlConnector", of["tandem"] / of["nixl"], 1.0))
        of = pair["tokens_per_s"]
        bars.append(Bar("the same: tokens/s", of["tandem"] / of["nixl"], 1.0, True))
    if idle := figures.get("idle"):
        for name, what, limit, at_least in (
            ("ttft_ms", "TTFT of 1,024", 1.02, False),
            ("itl_ms", "ITL of 8 streams", 1.02, False),
            ("tokens_per_s", "tokens/s of 32", 0.98, True),
        ):
            of = idle[name]
            bars.append(
                Bar(f"nothing to borrow: {what}, / without connector", of["with"] / of["without"], limit, at_least)
            )
    return bars
