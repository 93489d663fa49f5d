"""Report at the end of every benchmark: bar, measured, met or short; and the same as JSON."""

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
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


def conclude(name: str, bars: Sequence[Bar], figures: Mapping[str, Any], console: Console) -> None:
    """Print the table and the line `bars: M of N met`, and write .bench/<name>.json."""
    table = Table(title=f"{name}: bars", title_justify="left")
    for heading in ("what", "bar", "measured", ""):
        table.add_column(heading)
    for bar in bars:
        sign = ">=" if bar.at_least else "<="
        table.add_row(bar.what, f"{sign} {bar.limit:g}", f"{bar.measured:.2f}", "met" if bar.met else "short")
    console.print(table)
    console.print(f"bars: {sum(bar.met for bar in bars)} of {len(bars)} met")
    OUT.mkdir(exist_ok=True)
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    content = {
        "benchmark": name,
        "machine": machine,
        "bars": [asdict(bar) | {"met": bar.met} for bar in bars],
        "figures": figures,
    }
    (OUT / f"{name}.json").write_text(json.dumps(content, indent=1))
