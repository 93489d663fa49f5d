"""Report of a comparison: tables, JSON, and a verdict in a sentence."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich import box
from rich.table import Table

from simulator.replay import MODES, Run, Setup

SHOWN = ("p50", "p95", "p99")
MOMENTS = 24
MARGIN = 0.03
"""Smallest relative difference of goodput that counts: the timing model is no more exact."""


def verdict(runs: Sequence[Run]) -> str:
    """Return whether to disaggregate: goodput under the SLO per GPU, with the same routing on both sides."""
    if runs and not any(run.results.finished for run in runs):
        reasons = sum((Counter(run.reasons) for run in runs), Counter[str]())
        return f"Nothing was served: {reasons.most_common(1)[0][0]}" if reasons else "Nothing was served"
    ours = [run for run in runs if run.scenario.policy == "ours" and run.scenario.autoscale is None]
    together = _best([run for run in ours if run.scenario.mode == "aggregated"])
    apart = _best([run for run in ours if run.scenario.mode != "aggregated"])
    if together is None or apart is None:
        best = _best(runs)
        return "" if best is None else f"Best: {best.scenario.name}, {_goodput(best)}"
    base, other = together.results.goodput_per_gpu, apart.results.goodput_per_gpu
    if base <= 0 and other <= 0:
        return "Nothing keeps the SLO: more GPUs, or a looser SLO"
    name, change = apart.scenario.name, other / base - 1 if base > 0 else math.inf
    if change > MARGIN:
        more = "where aggregated keeps nothing" if change == math.inf else f"{change:+.0%} over aggregated"
        return f"Disaggregate: {name} gives {_goodput(apart)}, {more}"
    if change < -MARGIN:
        return f"Do not disaggregate: aggregated gives {_goodput(together)}; the best split, {name}, {change:+.0%}"
    return f"Disaggregation changes little: {name} gives {_goodput(apart)}, {change:+.1%} beside aggregated"


def _best(runs: Sequence[Run]) -> Run | None:
    """Return the run with the best goodput; among equals the lower TTFT."""
    return max(runs, key=lambda run: (run.results.goodput_per_gpu, -run.results.ttft_s.mean), default=None)


def _goodput(run: Run) -> str:
    return f"{run.results.goodput_per_gpu:.3g} requests/s per GPU within the SLO"


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


def as_json(runs: Sequence[Run], setup: Setup, trace: str) -> dict[str, Any]:
    """Return everything as JSON values; the same run gives the same.

    Values that are no numbers are null, and so are those a calibration does not have: model, GPU and cost.
    """
    said = finite(dataclasses.asdict(setup))
    if setup.calibration is not None:
        said |= {"model": None, "gpu": None}
    told = []
    for run in runs:
        figures = {**finite(dataclasses.asdict(run)), "within_slo": finite(run.results.kept_share)}
        if not setup.priced:
            figures["results"]["usd_per_million_output_tokens"] = None
        told.append({"name": run.scenario.name, **figures})
    return {"trace": trace, "verdict": verdict(runs), "setup": said, "runs": told}


def write_json(path: Path, runs: Sequence[Run], setup: Setup, trace: str) -> None:
    path.write_text(json.dumps(as_json(runs, setup, trace), indent=1) + "\n")


def finite(value: Any) -> Any:
    """Replace values that JSON cannot express by null."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _figure(value: float) -> str:
    """Format a figure with five characters at most."""
    if math.isnan(value):
        return "-"
    digits = 3 if value < 0.1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"
