"""`python -m bench.router [PART ...]`: all parts, or the named ones."""

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console

from bench.router import added, decisions, picker_load, streams
from bench.support.report import Bar, conclude

PARTS: dict[str, Callable[[Console], tuple[list[Bar], dict[str, Any]]]] = {
    "decisions": decisions.measure,
    "added": added.measure,
    "streams": streams.measure,
    "picker": picker_load.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.router", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parts = parser.parse_args().parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(unknown)}")
    console = Console()
    bars: list[Bar] = []
    figures: dict[str, Any] = {}
    for part in parts:
        part_bars, figures[part] = PARTS[part](console)
        console.print(figures[part])
        bars += part_bars
    conclude("router" if len(parts) == len(PARTS) else f"router-{'-'.join(parts)}", bars, figures, console)


if __name__ == "__main__":
    main()
