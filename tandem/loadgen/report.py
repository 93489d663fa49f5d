"""Report of a run against a live cluster: table, JSON and picture."""

import dataclasses
import json
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from protos import inference_pb2 as pb
from workloads.report import finite, open_figures
from workloads.results import SHARES, LatencySummary, Results, Slo


@dataclass(slots=True)
class Receipts:
    """Sums over the receipts of a run."""

    count: int = 0
    stages_s: dict[str, list[float]] = field(default_factory=dict)
    blocks: Counter[str] = field(default_factory=Counter)
    transports: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    predicted: list[tuple[float, float]] = field(default_factory=list)
    """Predicted and actual seconds to the first token."""

    def add(self, receipt: pb.Receipt, ttft_s: float) -> None:
        if not receipt.request_id:
            return
        self.count += 1
        for stage in receipt.stages:
            self.stages_s.setdefault(stage.name, []).append(stage.duration_ms / 1e3)
        kv = receipt.kv
        for name in ("reused", "moved", "computed", "restored", "verified", "mismatched"):
            self.blocks[name] += getattr(kv, f"{name}_blocks")
        self.blocks["preemptions"] += kv.preemptions
        if kv.moved_blocks:
            self.transports[" ".join([kv.transport, *kv.ucx_transports])] += 1
        if kv.loan_failure:
            self.failures[kv.loan_failure] += 1
        if receipt.placement.predicted_ttft_ms:
            self.predicted.append((receipt.placement.predicted_ttft_ms / 1e3, ttft_s))


@dataclass(slots=True)
class Report:
    """Report of one run."""

    title: str
    slo: Slo
    num_gpus: int
    results: Results
    offered_per_s: float
    """Requests due, or sent, per second of the run."""
    most_under_way: int
    late: LatencySummary
    """Lateness of an open loop."""
    receipts: Receipts
    reasons: dict[str, int]
    first_tokens: Sequence[tuple[float, float]]
    """Due time since the beginning, and TTFT, of each finished request; seconds."""
    priced: bool = True
    left_out: int = 0
    """Requests of the trace that were longer than the model's context and not sent."""
    requests_of_trace: int = 0
    """Number of requests in the trace."""
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 130 after Ctrl-C, 1 where nothing was served."""
        return 130 if self.interrupted else int(not self.results.finished)

    @property
    def left_out_in_words(self) -> str:
        """Text about requests that were not sent; empty where all were."""
        if not self.left_out:
            return ""
        return f"{self.left_out:,} of {self.requests_of_trace:,} left out: longer than the context"


def tables_of(report: Report) -> list[Table]:
    """Return the tables of times, totals and stages."""
    results = report.results
    times = Table(title=report.title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "mean", *SHARES):
        times.add_column(name, justify="right" if name else "left")
    rows = {
        "time to first token, ms": results.ttft_s,
        "between tokens, ms": results.itl_s,
        "whole request, ms": results.e2e_s,
        "sent late, ms": report.late,
    }
    rows |= {
        f"  {name}, ms": LatencySummary.of(array("d", values)) for name, values in report.receipts.stages_s.items()
    }
    for name, spread in rows.items():
        if not math.isnan(spread.mean):
            times.add_row(name, *(f"{1e3 * getattr(spread, share):.2f}" for share in ("mean", *SHARES)))
    sums = Table(box=box.SIMPLE_HEAD, show_header=False)
    for name, value in _facts(report).items():
        sums.add_row(name, value)
    return [times, sums]


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON values; values that are no number are null."""
    receipts = report.receipts
    return {
        "title": report.title,
        "slo": dataclasses.asdict(report.slo),
        "gpus": report.num_gpus,
        "offered_per_s": report.offered_per_s,
        "results": finite(dataclasses.asdict(report.results)) | {"within_slo": finite(report.results.kept_share)},
        "late_s": finite(dataclasses.asdict(report.late)),
        "most_under_way": report.most_under_way,
        "left_out": {"longer_than_context": report.left_out, "of": report.requests_of_trace},
        "interrupted": report.interrupted,
        "reasons": report.reasons,
        "receipts": {
            "count": receipts.count,
            "stages_s": {
                name: finite(dataclasses.asdict(LatencySummary.of(array("d", values))))
                for name, values in receipts.stages_s.items()
            },
            "blocks": dict(receipts.blocks),
            "transports": dict(receipts.transports),
            "loan_failures": dict(receipts.failures),
            "prediction_error": finite(_error_of(receipts)),
        },
    }


def write_json(path: Path, report: Report) -> None:
    path.write_text(json.dumps(as_json(report), indent=1) + "\n")


def write_plot(path: Path, report: Report) -> None:
    """Plot first tokens over time, all times as distributions, and stages.

    Raises BadSetup without matplotlib.
    """
    figure = open_figures()(figsize=(14, 4.5), dpi=150, facecolor="white", layout="constrained")
    over_time, stages = figure.subplots(1, 2, width_ratios=(3, 2))
    due, ttft = np.array(report.first_tokens or [(0.0, math.nan)]).T
    over_time.plot(due, 1e3 * ttft, ".", markersize=3, alpha=0.5, color="#1f77b4")
    over_time.axhline(1e3 * report.slo.ttft_s, color="#c0392b", linewidth=1, linestyle=(0, (4, 3)))
    if np.nanmin(ttft) > 0:
        over_time.set_yscale("log")
    over_time.set_title("time to first token, ms, by when it was due; dashed: the SLO", fontsize=9.5, loc="left")
    over_time.set_xlabel("s", fontsize=8)
    names = [name for name in report.receipts.stages_s if name != "decode"]
    means = [1e3 * float(np.mean(report.receipts.stages_s[name])) for name in names]
    stages.barh(range(len(names)), means, color="#d08a2c")
    stages.set_yticks(range(len(names)), names, fontsize=8)
    stages.invert_yaxis()
    stages.set_title("stages before the first token, mean ms of those that had them", fontsize=9.5, loc="left")
    for axes in (over_time, stages):
        axes.grid(color="#d7dde2", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    results = report.results
    figure.suptitle(
        f"{report.title}: {report.offered_per_s:.3g} requests/s offered"
        f"{f' ({report.left_out_in_words})' if report.left_out else ''}\n{results.kept_share:.1%} within the SLO, "
        f"TTFT p50 {1e3 * results.ttft_s.p50:.3g} p99 {1e3 * results.ttft_s.p99:.3g} ms, "
        f"between tokens p50 {1e3 * results.itl_s.p50:.3g} p99 {1e3 * results.itl_s.p99:.3g} ms",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, format="png")


def _facts(report: Report) -> dict[str, str]:
    results, receipts = report.results, report.receipts
    span_s = max(results.duration_s, 1e-9)
    slo = f"TTFT {report.slo.ttft_s:g} s, ITL {1e3 * report.slo.itl_s:g} ms"
    facts = {
        "requests": f"{results.finished} finished, {results.refused} refused, {results.failed} failed; "
        f"{report.offered_per_s:.4g}/s offered, {results.finished / span_s:.4g}/s finished, "
        f"at most {report.most_under_way} under way",
        **({"of the trace": report.left_out_in_words} if report.left_out else {}),
        "tokens": f"{results.input_tokens / span_s:,.0f} in/s, {results.output_tokens / span_s:,.0f} out/s",
        f"within the SLO ({slo})": f"{results.kept_share:.1%}; "
        f"goodput {results.goodput_per_gpu:.4g}/s for each of {report.num_gpus} GPUs or workers",
        "prompt tokens from cache": f"{results.hit_rate:.1%}",
    }
    if report.priced:
        facts["cost"] = f"{results.usd_per_million_output_tokens:.2f} USD per million output tokens"
    if receipts.count:
        kv = receipts.blocks
        facts["KV blocks"] = (
            f"{kv['reused']} reused, {kv['moved']} moved ({kv['verified']} verified, {kv['mismatched']} wrong and not "
            f"used, {results.moved_bytes / 1e6:,.1f} MB), {kv['computed']} computed by decode, "
            f"{kv['restored']} restored; {kv['preemptions']} preemptions"
        )
        facts["transports"] = ", ".join(f"{name} x {count}" for name, count in receipts.transports.items()) or "-"
        if receipts.failures:
            facts["loans that failed"] = ", ".join(f"{count} x {name}" for name, count in receipts.failures.items())
        facts["TTFT predicted, off by (p50)"] = f"{_error_of(receipts):.0%}"
    facts |= {f"{count} x": reason for reason, count in sorted(report.reasons.items())}
    return facts


def _error_of(receipts: Receipts) -> float:
    """Return the median of |predicted / actual - 1|."""
    if not receipts.predicted:
        return math.nan
    predicted, seen = np.array(receipts.predicted).T
    return float(np.median(np.abs(predicted / np.maximum(seen, 1e-9) - 1)))
