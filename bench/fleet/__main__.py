"""`make bench-fleet`: the router over stock servers, beside other routers, and while servers fail."""

import tempfile
from pathlib import Path

import uvloop
from rich.console import Console

from bench.fleet.compare import compare, compare_bars
from bench.support.report import conclude


async def main() -> None:
    console = Console(width=160)
    with tempfile.TemporaryDirectory() as scratch:
        figures = {"compare": await compare(Path(scratch), console)}
    conclude("fleet", compare_bars(figures["compare"]), figures, console)


if __name__ == "__main__":
    uvloop.run(main())
