"""`make compare`, or `python -m bench.compare PART ...` for some parts."""

import argparse
import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench.compare import load, partition, routers
from bench.compare.systems import MODEL_NAME, Machine
from bench.models import SMALL_LLAMA, cpu_dtype, llama
from bench.support.report import OUT, Bar, Parts, conclude
from bench.vllm.faults import fault_bars, measure_faults

PARTS = ("faults", "partition", "load", "routers")


def this_machine() -> Machine:
    """Return the model in the precision that this CPU multiplies fast, and the cores."""
    dtype = cpu_dtype()
    model = llama((OUT / f"small-llama-{dtype}" / MODEL_NAME).absolute(), SMALL_LLAMA, dtype)
    return Machine(model, dtype, sorted(os.sched_getaffinity(0)))


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars of the parts that ran."""
    makers: dict[str, Callable[[Any], list[Bar]]] = {
        "faults": fault_bars,
        "load": load.bars_of,
        "routers": routers.bars_of,
    }
    return [bar for part, maker in makers.items() if part in figures for bar in maker(figures[part])]


async def main(parts: list[str], only: list[str]) -> None:
    console = Console(width=160)
    machine = await asyncio.to_thread(this_machine)
    scratch = Path(tempfile.mkdtemp(prefix="tandem-compare-"))
    work: dict[str, Callable[[], Awaitable[Any]]] = {
        "faults": lambda: measure_faults(machine.cores, scratch, console),
        "partition": lambda: partition.measure(machine.cores, scratch, console),
        "load": lambda: load.measure(machine, scratch, console, only),
        "routers": lambda: routers.measure(machine.model, console),
    }
    kept = Parts(console)
    try:
        for part in parts:
            await kept.measure(part, work[part]())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    name = "compare" if len(parts) == len(PARTS) and not only else f"compare-{'-'.join(parts)}"
    conclude(name, bars_of(kept.figures), kept.figures, console, kept.failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.compare", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--only", action="append", default=[], help="only systems of `load` whose names contain this text"
    )
    arguments = parser.parse_args()
    chosen = arguments.parts or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(unknown)}")
    uvloop.run(main(chosen, arguments.only))
