"""All parts of `make bench-tiers`, or those named as arguments."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from bench.report import Bar, Parts, conclude
from bench.tiers import damage, decisions, folder, live, pins, replayed, start

PARTS: dict[str, tuple[Callable[[Progress], Any], Callable[[dict[str, Any]], list[Bar]]]] = {
    "replayed": (replayed.measure, replayed.bars_of),
    "folder": (folder.measure, folder.bars_of),
    "live": (live.measure, live.bars_of),
    "pins": (pins.measure, pins.bars_of),
    "damage": (damage.measure, damage.bars_of),
    "decisions": (decisions.measure, decisions.bars_of),
    "start": (start.measure, start.bars_of),
}


async def of(measure: Callable[[Progress], Any], progress: Progress) -> Any:
    measured = measure(progress)
    return await measured if asyncio.iscoroutine(measured) else measured


async def main() -> None:
    console = Console()
    parts = Parts(console)
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := set(wanted) - set(PARTS):
        sys.exit(f"error: tiers: unknown part {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        for name in wanted:
            await parts.measure(name, of(PARTS[name][0], progress))
    bars = [bar for name, figures in parts.figures.items() for bar in PARTS[name][1](figures)]
    conclude("tiers", bars, parts.figures, console, parts.failed)


if __name__ == "__main__":
    asyncio.run(main())
