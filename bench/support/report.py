"""Report at the end of every benchmark: bar, measured, met or short; and the same as JSON."""

import json
import os
import platform
import statistics
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

OUT = Path(".bench")


@dataclass(frozen=True, slots=True)
class Bar:
    """Bar of a benchmark: `measured` is at most (or, with `at_least`, at least) `limit`."""

    what: str
    measured: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value of nearest rank; `share` is in [0, 1]."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def of_rounds(rounds: Sequence[Sequence[float]], share: float) -> float:
    """Return the median of the rounds' percentiles.

    A percentile of all values together would come from the moments when the machine stalled, which hit one side or the
    other.
    """
    return statistics.median(percentile(values, share) for values in rounds)


class Parts:
    """Parts of a benchmark: one that fails does not take the others' figures with it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.figures: dict[str, Any] = {}
        """Figures by part."""
        self.failed: dict[str, str] = {}
        """Reasons of parts that failed."""

    async def measure(self, part: str, measuring: Awaitable[Any]) -> None:
        with self.guard(part):
            self.figures[part] = await measuring

    @contextmanager
    def guard(self, part: str) -> Iterator[None]:
        """Note a failure inside as one of this part."""
        try:
            yield
        except Exception as error:  # whatever it is, it is told, and makes the bars of this part short
            self.failed[part] = f"{type(error).__name__}: {error}"
            self._console.print(f"{part} failed: {self.failed[part]}", markup=False)


def conclude(
    name: str,
    bars: Sequence[Bar],
    figures: Mapping[str, Any],
    console: Console,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Print the table and the line `bars: M of N met`, and write .bench/<name>.json.

    Each part that `failed` counts as one bar that is not met.
    """
    failed = failed or {}
    table = Table(title=f"{name}: bars", title_justify="left")
    for heading in ("what", "bar", "measured", ""):
        table.add_column(heading)
    for bar in bars:
        sign = ">=" if bar.at_least else "<="
        table.add_row(bar.what, f"{sign} {bar.limit:g}", f"{bar.measured:.2f}", "met" if bar.met else "short")
    for part in failed:
        table.add_row(part, "", "failed", "short")
    console.print(table)
    console.print(f"bars: {sum(bar.met for bar in bars)} of {len(bars) + len(failed)} met")
    save(name, bars, figures, failed)


def save(name: str, bars: Sequence[Bar], figures: Mapping[str, Any], failed: Mapping[str, str]) -> None:
    """Write .bench/<name>.json; also after each part, where a machine may go away before the last one."""
    OUT.mkdir(exist_ok=True)
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    content = {
        "benchmark": name,
        "machine": machine,
        "bars": [asdict(bar) | {"met": bar.met} for bar in bars],
        "failed": failed,
        "figures": figures,
    }
    (OUT / f"{name}.json").write_text(json.dumps(content, indent=1))
