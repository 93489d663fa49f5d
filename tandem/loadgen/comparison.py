"""The command `tandem compare`: the same load at several URLs, in turns."""

import asyncio
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table

from tandem.loadgen.command import BEGIN_S, OfferedLoad
from tandem.loadgen.drive import LoadDriver, SentRequest
from tandem.loadgen.frontends import Frontend
from workloads.request import MAX_HASH_ID, TraceRequest
from workloads.results import ResultCounter, Results, Slo

FIGURES: Mapping[str, tuple[float, str, str]] = {
    "time to first token, mean, ms": (1e3, "ttft_s", "mean"),
    "time to first token, p50, ms": (1e3, "ttft_s", "p50"),
    "time to first token, p99, ms": (1e3, "ttft_s", "p99"),
    "between tokens, mean, ms": (1e3, "itl_s", "mean"),
    "between tokens, p99, ms": (1e3, "itl_s", "p99"),
    "prompt tokens from a cache, %": (100.0, "hit_rate", ""),
    "requests finished": (1.0, "finished", ""),
    "requests refused or failed": (1.0, "unserved", ""),
}
"""Rows of the table: factor, figure of Results, and which of its quantiles."""


async def run_comparison(
    console: Console, frontends: Mapping[str, Frontend], load: OfferedLoad, rounds: int
) -> Mapping[str, Sequence[Results]]:
    """Load each frontend in turns, in an open loop; print and return their figures by frontend and round.

    Raises ServiceError, StartError, BadSetup and BadTrace.
    """
    found: dict[str, list[Results]] = {name: [] for name in frontends}
    async with AsyncExitStack() as stack:
        for frontend in frontends.values():
            await stack.enter_async_context(frontend)
        context = min(frontend.max_context_tokens for frontend in frontends.values())
        turns = len(frontends) * rounds
        for number in range(rounds):
            for place, (name, frontend) in enumerate(frontends.items()):
                requests = unlike(load.requests(context), number * len(frontends) + place, turns)
                found[name].append(await _one_turn(frontend, requests, load))
                console.print(f"round {number + 1} of {rounds}, {name}: done", markup=False, highlight=False)
    console.print(table_of(found))
    return found


def unlike(requests: Iterable[TraceRequest], turn: int, turns: int) -> Iterator[TraceRequest]:
    """Yield requests of the same lengths, times and sharing, with prompts that no other turn has.

    The servers behind two URLs may be the same: a turn must not find what another one left in their caches.
    """
    for request in requests:
        hash_ids = tuple((hash_id * turns + turn) % MAX_HASH_ID for hash_id in request.hash_ids)
        yield replace(request, hash_ids=hash_ids, number=request.number * turns + turn)


async def _one_turn(frontend: Frontend, requests: Iterator[TraceRequest], load: OfferedLoad) -> Results:
    begins_at = asyncio.get_running_loop().time() + BEGIN_S
    counter = ResultCounter(Slo(1.0, 1.0), begins_at + load.warmup_s)

    def ended(sent: SentRequest) -> None:
        if sent.counted:
            counter.add(sent.outcome)

    drive = LoadDriver(frontend, ended, load.warmup_s)
    await drive.open_loop(requests, begins_at)
    return counter.results(drive.sent.gaps, 0.0, 0.0, 0.0)


def table_of(found: Mapping[str, Sequence[Results]]) -> Table:
    """Return the table of medians over the rounds, and of each frontend's ratio to the first."""
    first, *others = found
    table = Table(title="medians of the rounds", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column(first, justify="right")
    for name in others:
        table.add_column(name, justify="right")
        table.add_column("/ the first", justify="right")
    for title, figure in FIGURES.items():
        base = _median(found[first], figure)
        cells = [f"{base:.2f}"]
        for name in others:
            value = _median(found[name], figure)
            cells += [f"{value:.2f}", f"{value / base:.2f}" if base else "-"]
        table.add_row(title, *cells)
    return table


def _median(rounds: Sequence[Results], figure: tuple[float, str, str]) -> float:
    factor, name, quantile = figure
    if name == "unserved":
        return statistics.median(results.refused + results.failed for results in rounds)
    values = [getattr(results, name) for results in rounds]
    return factor * float(statistics.median(getattr(value, quantile) if quantile else value for value in values))
