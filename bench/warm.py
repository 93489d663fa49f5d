"""`make bench-warm`: TTFT of the first request of a fresh worker beside that of its tenth.

The demo model on one prefill and one decode worker, whose KV moves over TCP. Each round starts both afresh, then starts
the prefill worker again beside the running decode worker, then replaces the decode worker by one that joins later.
After each start, as soon as the worker is ready, ten prompts of one length go through, one after the other, and no two
begin alike. The ratio is the median of the rounds' first TTFT over the median of their tenth.
"""

import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from bench.report import Bar, Parts, conclude
from bench.vllm.compared import VLLM
from bench.workers import Workers
from tandem.storyteller import STORYTELLER

ROUNDS = {"torch": 7, "vllm": 3}
REQUESTS = 10
PROMPT_TOKENS = 64
MAX_RATIO = 1.5
PAUSE_S = 0.1
STARTS = ("fresh workers", "prefill worker started again", "decode worker that joins later")
ENGINES: dict[str, dict[str, Any]] = {
    "torch": {"engine": "torch", "kv_memory_mib": 64},
    "vllm": {"engine": "vllm", "vllm_python": VLLM / "bin" / "python", "kv_memory_mib": 64},
}


@dataclass(frozen=True, slots=True)
class _Request:
    ttft_s: float
    stages: dict[str, float]
    """Milliseconds by stage, as the receipt has them."""
    loan_failure: str


async def measure(engine: str, console: Console) -> dict[str, Any]:
    """Return milliseconds to the first token and of the receipts' stages, by start, then by number of the request."""
    rounds = [await _round(ENGINES[engine], number) for number in range(_rounds(engine))]
    figures: dict[str, Any] = {}
    for start in STARTS:
        by_request = [[each[start][number] for each in rounds] for number in range(REQUESTS)]
        ttft = [statistics.median(request.ttft_s * 1e3 for request in requests) for requests in by_request]
        stages = {"first": _stages(by_request[0]), "tenth": _stages(by_request[-1])}
        failures = [request.loan_failure for requests in by_request for request in requests if request.loan_failure]
        every = [[request.ttft_s * 1e3 for request in requests] for requests in by_request]
        figures[start] = {"ttft_ms": ttft, "ratio": ttft[0] / ttft[-1], "stages_ms": stages, "of_rounds_ms": every}
        figures[start]["loan_failures"] = failures
        shown = ", ".join(f"{value:.1f}" for value in ttft)
        console.print(f"{engine}, {start}: TTFT in ms {shown}", markup=False)
        for failure in failures:
            console.print(f"  a loan failed: {failure}", markup=False)
        for which, values in stages.items():
            listed = ", ".join(f"{name} {value:.1f}" for name, value in values.items())
            console.print(f"  stages of the {which}, in ms: {listed}", markup=False)
    return figures


def _rounds(engine: str) -> int:
    return int(os.environ.get("ROUNDS", ROUNDS[engine]))


async def _round(settings: dict[str, Any], number: int) -> dict[str, list[_Request]]:
    one, *others = sorted(os.sched_getaffinity(0))
    worker = {"model": STORYTELLER, "strict_lanes": ("tcp",)} | settings
    prefill = worker | {"cores": (others or [one])[:1]}
    decode = worker | {"cores": [one]}
    found: dict[str, list[_Request]] = {}
    async with Workers(prefill=prefill, decode=decode) as workers:
        found[STARTS[0]] = await _ask(workers, "decode", f"{number} fresh")
        await workers.stop("prefill")
        await workers.start("prefill", prefill)
        found[STARTS[1]] = await _ask(workers, "decode", f"{number} again")
        await workers.start("decode_later", decode)
        await workers.stop("decode")
        found[STARTS[2]] = await _ask(workers, "decode_later", f"{number} later")
    return found


async def _ask(workers: Workers, decode: str, seed: str) -> list[_Request]:
    """Send prompts that no cache holds, one after the other."""
    await workers.reach(decode)
    seeds = random.Random(seed)
    requests = []
    for _ in range(REQUESTS):
        prompt = seeds.choices(range(3, 2048), k=PROMPT_TOKENS)
        began_at = time.perf_counter()
        receipt, _ = await workers.decode(decode, prompt, "prefill")
        stages = {stage.name: stage.duration_ms for stage in receipt.stages}
        requests.append(_Request(time.perf_counter() - began_at, stages, receipt.kv.loan_failure))
        await asyncio.sleep(PAUSE_S)
    return requests


def _stages(requests: Sequence[_Request]) -> dict[str, float]:
    names = requests[0].stages
    return {name: statistics.median(each.stages.get(name, 0.0) for each in requests) for name in names}


async def main(engines: Sequence[str]) -> None:
    console = Console()
    parts = Parts(console)
    for engine in engines:
        await parts.measure(engine, measure(engine, console))
    bars = [
        Bar(f"{engine}, {start}: TTFT of the first request / tenth", of_start["ratio"], MAX_RATIO)
        for engine, figures in parts.figures.items()
        for start, of_start in figures.items()
    ]
    conclude("warm", bars, parts.figures, console, parts.failed)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or tuple(ENGINES)))
