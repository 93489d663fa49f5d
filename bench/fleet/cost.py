"""CPU time of a router for a request: over stock servers beside its own workers, in turns."""

from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from bench.router.cost import RATES, ROOT, ROUNDS, one_round, site
from bench.support.report import Bar

COUNT = 8
MAX_RATIO = 1.3


async def measure_cost(scratch: Path, console: Console) -> dict[str, dict[str, float]]:
    """Return the milliseconds of CPU for each request over HTTP, by rate and what the router is over."""
    found: dict[str, dict[str, list[float]]] = {f"{rate:g}/s": {"workers": [], "servers": []} for rate in RATES}
    async with site(ROOT, COUNT) as workers, site(ROOT, 0, COUNT) as servers:
        for number in range(1 + ROUNDS):
            for rate in RATES:
                for name, where in (("workers", workers), ("servers", servers)):
                    used = await one_round(where, "http", rate, number)
                    if number:  # round 0 warms up
                        found[f"{rate:g}/s"][name].append(used)
    medians = {rate: {name: median(used) for name, used in each.items()} for rate, each in found.items()}
    console.print(medians)
    return medians


def cost_bars(figures: dict[str, dict[str, Any]]) -> list[Bar]:
    return [
        Bar(f"router CPU a request, {rate}, servers / workers", each["servers"] / each["workers"], MAX_RATIO)
        for rate, each in figures.items()
    ]
