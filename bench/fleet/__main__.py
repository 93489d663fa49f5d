"""`make bench-fleet`: the router over stock servers, beside other routers, and while servers fail.

`python -m bench.fleet PART...` runs some of its parts: compare, cost, faults.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench.fleet.compare import compare, compare_bars
from bench.fleet.cost import cost_bars, measure_cost
from bench.fleet.faults import fault_bars, measure_faults
from bench.support.report import Bar, conclude

PARTS: dict[str, tuple[Callable[[Path, Console], Any], Callable[[Any], list[Bar]]]] = {
    "compare": (compare, compare_bars),
    "cost": (measure_cost, cost_bars),
    "faults": (measure_faults, fault_bars),
}


async def main(parts: list[str]) -> None:
    console, figures, bars = Console(width=160), dict[str, Any](), list[Bar]()
    for name in parts or PARTS:
        measure, bars_of = PARTS[name]
        with tempfile.TemporaryDirectory() as scratch:
            figures[name] = await measure(Path(scratch), console)
        bars += bars_of(figures[name])
    conclude("fleet", bars, figures, console)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
