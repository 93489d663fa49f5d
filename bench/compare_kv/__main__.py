"""`make compare-kv`, or `python -m bench.compare_kv --sides nixl workers --cases stale cut --rounds 1`.

Each case runs on each side in every round; the end is a table, bars, and .bench/compare-kv.json.
"""

import argparse
import asyncio
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.compare_kv.cases import CASES, Outcome, figures_of, row_of, run_case
from bench.compare_kv.sides import (
    HANG_S,
    TITLES,
    VLLM,
    WORKERS,
    Truth,
    one_server,
    opened,
)
from bench.support.report import Bar, Parts, conclude, save
from bench.vllm.sides import end_on_sigterm
from support.namespaces import missing

NAME = "compare-kv"
DEFAULT_SIDES = ("nixl", "tandem", WORKERS)
OURS = ("tandem", WORKERS)
Outcomes = dict[str, dict[str, list[Outcome]]]
"""Outcomes by side and case."""


async def measure(
    side: str, cases: Sequence[str], rounds: int, truth: Truth, scratch: Path, outcomes: Outcomes, console: Console
) -> None:
    """Run all rounds on one side."""
    cores = sorted(os.sched_getaffinity(0))
    async with opened(side, scratch, cores) as serving:
        await run_case(CASES["none"], serving, "warm-up", truth)
        for number in range(rounds):
            for name in cases:
                outcome = await run_case(CASES[name], serving, f"{name} {number}", truth)
                outcomes[side].setdefault(name, []).append(outcome)
                row, notes = row_of(CASES[name], [outcome]), {**outcome.held, **outcome.notes}
                console.print(f"{side}, {name}, round {number + 1}: {row.text()} {notes or ''}", markup=False)
                save(NAME, bars_of(outcomes), figures(outcomes), {})


def figures(outcomes: Outcomes) -> dict[str, Any]:
    """Return what the JSON has."""
    cases = {
        side: {name: figures_of(CASES[name], each) for name, each in found.items()} for side, found in outcomes.items()
    }
    return {"vllm": vllm_version(), "sides": cases}


def bars_of(outcomes: Outcomes) -> list[Bar]:
    """Return the bars of Tandem's sides; what vLLM's connector does is measured only."""
    bars = []
    for side in (side for side in OURS if outcomes.get(side)):
        rows = [row_of(CASES[name], each) for name, each in outcomes[side].items()]
        for what, number in {
            "answers with wrong tokens": sum(row.wrong for row in rows),
            "requests lost": sum(row.lost for row in rows),
            f"requests hung beyond {HANG_S:g} s": sum(row.hung for row in rows),
            "trials after which blocks were held": sum(row.held for row in rows),
            "trials after which the next request failed": sum(row.broken for row in rows),
            "trials in which a server crashed": sum(row.crashed for row in rows),
        }.items():
            bars.append(Bar(f"{TITLES[side]}: {what}", number, 0))
    return bars


def table_of(outcomes: Outcomes) -> Table:
    table = Table(title=f"When KV goes wrong, vLLM {vllm_version()}", title_justify="left")
    for heading in ("case", *(TITLES[side] for side in outcomes)):
        table.add_column(heading)
    for name, case in CASES.items():
        if any(name in found for found in outcomes.values()):
            rows = (row_of(case, found[name]).text() if name in found else "" for found in outcomes.values())
            table.add_row(case.title, *rows)
    return table


def vllm_version() -> str:
    (packages,) = VLLM.glob("lib/python3*/site-packages")
    found = distributions(path=[str(packages)], name="vllm")
    return next(each.version for each in found)


def left_out(sides: Sequence[str]) -> Mapping[str, str]:
    """Return why sides cannot run here."""
    reasons = {}
    if "tandem" in sides and importlib.util.find_spec("tandem_connector") is None:
        reasons["tandem"] = "no module tandem_connector"
    return reasons


async def main(sides: Sequence[str], cases: Sequence[str], rounds: int) -> None:
    end_on_sigterm()
    console = Console(width=200)
    reasons = left_out(sides)
    for side, reason in reasons.items():
        console.print(f"{TITLES[side]} is left out: {reason}")
    scratch = Path(tempfile.mkdtemp(prefix="tandem-kv-"))
    outcomes: Outcomes = {side: {} for side in sides if side not in reasons}
    parts = Parts(console)
    try:
        async with one_server(scratch / "one", min(os.sched_getaffinity(0))) as truth:
            for side in outcomes:
                await parts.measure(side, measure(side, cases, rounds, truth, scratch, outcomes, console))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    console.print(table_of(outcomes))
    conclude(NAME, bars_of(outcomes), figures(outcomes), console, parts.failed)
    if parts.failed:
        sys.exit(f"error: these sides failed: {', '.join(parts.failed)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.compare_kv")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each case (20)")
    parser.add_argument("--sides", nargs="+", choices=TITLES, default=DEFAULT_SIDES)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    given = parser.parse_args()
    if reason := missing():
        sys.exit(f"error: {reason}")
    asyncio.run(main(given.sides, given.cases, given.rounds))
