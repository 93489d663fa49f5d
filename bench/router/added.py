"""Latency that the cluster adds to the time to first token at 200 requests a second, arriving at random.

The reference is a bare grpc.aio chain of the same hops and messages, in turns; on both sides the router is one process,
and decode and lender together are another. `bench/serving.py` defines added latency: TTFT less the wait for the running
step and the request's own. Quantiles are medians of the rounds' quantiles; those of all requests together are shown
beside them.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import uvloop
from rich.console import Console
from rich.progress import track

from bench.bare.chain import NUM_TOKENS, STEP_S
from bench.models import SIM_VOCAB
from bench.router.site import bare, sim_site
from bench.serving import PROMPT_TOKENS, chain_added, computed_s
from bench.support.report import Bar, of_rounds, percentile
from cluster.network.rpc import channel
from cluster.process.memory import spare_the_started
from protos import inference_pb2 as pb

RATE = 200.0
ROUNDS = 12
ROUND_S = 4.0
MAX_ADDED = 1.5
RequestT = TypeVar("RequestT")


def arrivals(seeds: random.Random) -> list[float]:
    """Return the arrivals of one round, in seconds from its start."""
    moments = list(accumulate(seeds.expovariate(RATE) for _ in range(int(2 * RATE * ROUND_S))))
    return [moment for moment in moments if moment < ROUND_S]


async def one_round(ask: Callable[[bytes], Awaitable[RequestT]], moments: Sequence[float]) -> list[RequestT]:
    """Send requests at the given moments without waiting for answers.

    Requests are made before and answers are parsed afterwards: the client's own work is no latency of the cluster.
    """
    prompts = [_request() for _ in moments]
    loop = asyncio.get_running_loop()
    running: list[asyncio.Task[RequestT]] = []
    start = loop.time()
    for moment, prompt in zip(moments, prompts, strict=True):
        await asyncio.sleep(start + moment - loop.time())
        running.append(asyncio.ensure_future(ask(prompt)))
    return list(await asyncio.gather(*running))


def _request() -> bytes:
    prompt = [random.randrange(SIM_VOCAB) for _ in range(PROMPT_TOKENS)]
    request = pb.GenerateRequest(token_ids=prompt, sampling=pb.Sampling(max_tokens=NUM_TOKENS))
    return request.SerializeToString()


async def tandem_asked(call: Any, request: bytes) -> tuple[float, bytes]:
    """Return the TTFT and the last message."""
    started_at, ttft_s, message = time.monotonic(), 0.0, b""
    async for message in call(request):  # noqa: B007
        ttft_s = ttft_s or time.monotonic() - started_at
    return ttft_s, message


def tandem_added(ttft_s: float, last_message: bytes) -> float:
    return ttft_s - computed_s(pb.GenerateResponse.FromString(last_message).finish.receipt)


async def compare(console: Console) -> dict[str, Any]:
    ours: list[list[float]] = []
    chain: list[list[float]] = []
    seeds = random.Random(1)
    router = {"decode_prefill_tokens_per_s": 100.0, "learn_rates": False}  # so that every prompt is lent
    workers: dict[str, Any] = {
        "worker": {"kv_memory_mib": 64, "sim_reads": "last"},
        "decode_worker": {"sim_step_ms": STEP_S * 1e3},
    }
    async with contextlib.AsyncExitStack() as stack:
        site = await stack.enter_async_context(sim_site(router, **workers))
        to_router = await stack.enter_async_context(channel(site.router.address))
        generate: Any = to_router.unary_stream("/tandem.v1.Inference/Generate")
        bare_workers = await stack.enter_async_context(bare("workers"))
        bare_router = await stack.enter_async_context(bare("router", bare_workers.address))
        call: Any = (await stack.enter_async_context(channel(bare_router.address))).unary_stream("/chain/Generate")
        spare_the_started()  # otherwise the client's own collections are part of both tails
        for number in track(range(1 + ROUNDS), "added latency", console=console):
            asked = await one_round(lambda request: tandem_asked(generate, request), arrivals(seeds))
            added = await one_round(lambda _: chain_added(call), arrivals(seeds))
            if number:  # round 0 warms up
                ours.append([tandem_added(*each) for each in asked])
                chain.append(added)
    return {name: _quantiles(rounds) for name, rounds in (("tandem", ours), ("bare", chain))}


def _quantiles(rounds: list[list[float]]) -> dict[str, float]:
    together = [seconds for of_round in rounds for seconds in of_round]
    figures: dict[str, float] = {"requests": len(together)}
    for q in (50, 90, 99):
        figures[f"p{q}_ms"] = 1e3 * of_rounds(rounds, q / 100)
        figures[f"p{q}_of_all_ms"] = 1e3 * percentile(together, q / 100)
    return figures


def measure(console: Console) -> tuple[list[Bar], dict[str, Any]]:
    figures = uvloop.run(compare(console))
    bars = [
        Bar(
            f"added latency to first token at {RATE:g} requests/s / a bare grpc.aio chain's, {quantile}",
            figures["tandem"][f"{quantile}_ms"] / figures["bare"][f"{quantile}_ms"],
            MAX_ADDED,
        )
        for quantile in ("p50", "p99")
    ]
    return bars, figures
