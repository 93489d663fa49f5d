"""Report of a comparison: tables, JSON, and advice in a sentence."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from sizing.comparison.advice import Comparison, Verdict
from sizing.comparison.replay import MODES, Run, Setup
from workloads.report import finite

SHOWN = ("p50", "p95", "p99")
MOMENTS = 24


def advice(runs: Sequence[Run], comparison: Comparison | None = None) -> str:
    """Return whether to disaggregate, in a sentence; without a comparison, which cluster is best."""
    if runs and not any(run.results.finished for run in runs):
        reasons = sum((Counter(run.reasons) for run in runs), Counter[str]())
        return f"Nothing was served: {reasons.most_common(1)[0][0]}" if reasons else "Nothing was served"
    if comparison is None:
        best = _best(runs)
        return "" if best is None else f"Best: {best.scenario.name}, {_goodput(best.results.goodput_per_gpu)}"
    name, together, apart = comparison.split.name, _goodput(comparison.together), _goodput(comparison.apart)
    match verdict(comparison):
        case None:
            return "Nothing keeps the SLO: more GPUs, or a looser SLO"
        case "disaggregate":
            return f"Disaggregate: {name} gives {apart}, {_change(comparison)} beside aggregated"
        case "aggregate":
            return f"Do not disaggregate: aggregated gives {together}; the best split, {name}, {_change(comparison)}"
        case "even":
            qualifier = "" if comparison.settled else " as far as this trace tells"
            return (
                f"Even{qualifier}, so do not disaggregate: aggregated has fewer parts and gives {together};"
                f" the best split, {name}, {_change(comparison)}"
            )


def verdict(comparison: Comparison | None) -> Verdict | None:
    """Return the verdict; None without a comparison, or where neither cluster keeps the SLO."""
    return comparison.verdict if comparison is not None and (comparison.together or comparison.apart) else None


def _change(comparison: Comparison) -> str:
    """Return the difference beside its interval."""
    seeds = len(comparison.together_by_seed)
    of = f"95 % interval, {seeds} seed{'s' if seeds > 1 else ''}"
    lower, upper = comparison.interval
    if not math.isfinite(lower) and comparison.together:
        return f"{comparison.change:+.1%} (no interval: too few requests)"
    if not comparison.together:
        return f"more by {comparison.lower:.3g} to {comparison.upper:.3g} ({of})"
    return f"{comparison.change:+.1%} ({lower:+.1%} to {upper:+.1%}: {of})"


def _best(runs: Sequence[Run]) -> Run | None:
    """Return the run with the best goodput; among equals the lower TTFT."""
    return max(runs, key=lambda run: (run.results.goodput_per_gpu, -run.results.ttft_s.mean), default=None)


def _goodput(per_gpu: float) -> str:
    return f"{per_gpu:.3g} requests/s per GPU within the SLO"


def tables_of(runs: Sequence[Run], setup: Setup) -> list[Table]:
    """Return the tables of times and of totals, one row per run."""
    slo = f"TTFT {setup.slo.ttft_s:g} s, ITL {setup.slo.itl_s * 1e3:g} ms"
    title = f"{setup.hardware_name}, SLO: {slo}"
    if setup.calibration is not None and setup.calibration.caveat:
        title += f"\n{setup.calibration.caveat}"
    names = [f"{name}\n{share}" for name in ("TTFT s", "ITL ms", "E2E s") for share in SHOWN]
    times = _table(title, [name if name.endswith("p50") else "\n" + name[-3:] for name in names])
    sums = _table(
        "",
        [
            "within\nSLO",
            "goodput\n/s/GPU",
            "GPU\nhours",
            "cache\nhits",
            "GB\nmoved",
            "refused\n",
            *(["USD per M\nout tokens"] if setup.priced else []),
        ],
    )
    best = _best(runs)
    for run in runs:
        results, style = run.results, "bold" if run is best else ""
        spreads = ((results.ttft_s, 1.0), (results.itl_s, 1e3), (results.e2e_s, 1.0))
        figures = (
            _figure(value * unit) for each, unit in spreads for value in (getattr(each, share) for share in SHOWN)
        )
        times.add_row(run.scenario.name, *figures, style=style)
        lost = str(results.refused) + (f" +{results.failed} failed" if results.failed else "")
        sums.add_row(
            run.scenario.name,
            f"{results.kept_share:.1%}",
            f"{results.goodput_per_gpu:.3g}",
            f"{results.gpu_hours:.2f}",
            f"{results.hit_rate:.1%}",
            f"{results.moved_bytes / 1e9:,.0f}",
            lost,
            *([f"{results.usd_per_million_output_tokens:.2f}"] if setup.priced else []),
            style=style,
        )
    return [times, sums, *(_sizes(run) for run in runs if run.sizes)]


def _sizes(run: Run) -> Table:
    """Return the sizes of an autoscaled cluster at MOMENTS moments."""
    table = Table(title=f"{run.scenario.name}: workers", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("at s", "prefill", "decode", "starting", "wanted"):
        table.add_column(name, justify="right")
    sizes = run.sizes
    for size in sizes[:: max(1, -(-len(sizes) // MOMENTS))]:
        counts = (size.prefill, size.decode, size.starting)
        table.add_row(f"{size.at_s:.0f}", *map(str, counts), f"{size.wanted_prefill} + {size.wanted_decode}")
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("\ncluster", min_width=max(map(len, MODES)))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True, min_width=max(map(len, [*name.split("\n"), "00.00"])))
    return table


def as_json(runs: Sequence[Run], setup: Setup, trace: str, comparison: Comparison | None = None) -> dict[str, Any]:
    """Return everything as JSON values; the same run gives the same.

    Values that are no numbers are null, and so are those a calibration does not have: model, GPU and cost. `runs` are
    those of the first seed; `difference` is over all seeds.
    """
    settings = finite(dataclasses.asdict(setup))
    if setup.calibration is not None:
        settings |= {"model": None, "gpu": None}
    run_rows = []
    for run in runs:
        figures = {**finite(dataclasses.asdict(run)), "within_slo": finite(run.results.kept_share)}
        if not setup.priced:
            figures["results"]["usd_per_million_output_tokens"] = None
        run_rows.append({"name": run.scenario.name, **figures})
    return {
        "trace": trace,
        "verdict": verdict(comparison),
        "advice": advice(runs, comparison),
        "difference": None if comparison is None else finite(comparison.as_json()),
        "setup": settings,
        "runs": run_rows,
    }


def write_json(path: Path, runs: Sequence[Run], setup: Setup, trace: str, comparison: Comparison | None) -> None:
    path.write_text(json.dumps(as_json(runs, setup, trace, comparison), indent=1) + "\n")


def _figure(value: float) -> str:
    """Format a figure with five characters at most."""
    if math.isnan(value):
        return "-"
    digits = 3 if value < 0.1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"
