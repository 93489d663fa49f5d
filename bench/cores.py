"""`make bench-cores`: a prefill and a decode engine on one machine, by how they choose their cores.

They are told their cores, find them by themselves, or take all of them each. The model has Qwen2 0.5 B's shape; 8
running streams meet a prompt of 1,024 tokens every 3 s. One cluster runs at a time, in turns: engines of two at once
would make room for each other.
"""

import asyncio
import os
import statistics
import sys
from typing import Any

from rich.console import Console

from bench.engine import Tandem, interference, request
from bench.models import qwen2_half_b
from bench.report import OUT, Bar, conclude
from tandem.topology import TOLD_NOTHING

ROUNDS = 3
TOLD, BY_THEMSELVES, ALL = "told", "by themselves", "all of them each"


async def compare(console: Console) -> dict[str, dict[str, float]]:
    """Return medians of the rounds, in milliseconds, by the way in which engines choose cores."""
    model, cores = qwen2_half_b(OUT / "qwen2-0.5b"), sorted(os.sched_getaffinity(0))
    ways = {TOLD: {}, BY_THEMSELVES: TOLD_NOTHING, ALL: TOLD_NOTHING | {"threads": len(cores)}}
    measured: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(ROUNDS):
        for way, settings in ways.items():
            async with Tandem(model, cores, 1, **settings) as tandem:
                await request(tandem.generate, 64, 8, 1)
                measured[way].append(await interference(tandem.generate, 1000 * number))
            console.print(way, {name: value for name, value in measured[way][-1].items() if name != "ttfts"})
    return {
        way: {name: statistics.median(each[name] for each in rounds) for name in ("itl_p50", "itl_p99", "ttft_p50")}
        for way, rounds in measured.items()
    }


def bars_of(figures: dict[str, dict[str, float]]) -> list[Bar]:
    names = {"itl_p99": "p99 inter-token latency of streams", "ttft_p50": "TTFT of long prompts"}
    return [
        Bar(f"{title}: by themselves / told", figures[BY_THEMSELVES][name] / figures[TOLD][name], 1.25)
        for name, title in names.items()
    ]


async def main() -> None:
    console = Console()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("error: cores: one cannot be shared out")
    figures = await compare(console)
    console.print(figures)
    conclude("cores", bars_of(figures), figures, console)


if __name__ == "__main__":
    asyncio.run(main())
