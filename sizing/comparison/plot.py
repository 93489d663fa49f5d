"""A comparison as a picture: one row per cluster, one column per question.

Needs matplotlib (the extra `sizing`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sizing.comparison.replay import MODES, Run, Setup
from workloads.report import open_figures
from workloads.results import LatencySummary, Results

COLOURS = dict(zip(MODES, ("#5b6b7b", "#d08a2c", "#1f77b4"), strict=True))
PANELS_WIDTH = 13.2
"""Width of all panels in inches, without the clusters' names."""
SIZES_HEIGHT = 1.9
"""Height in inches of the plot of one cluster's sizes over time."""
INK, FAINT = "#22282e", "#d7dde2"


def write_plot(path: Path, runs: Sequence[Run], setup: Setup, trace: str, headline: str) -> None:
    """Write the picture, under a headline.

    Raises BadSetup without matplotlib.
    """
    sized = [run for run in runs if run.sizes]
    below = SIZES_HEIGHT * len(sized)
    lines = _subtitle(runs, setup, trace)
    head = 0.62 + 0.23 * len(lines)
    height = head + 1.25 + 0.42 * len(runs) + below
    names = 0.3 + 0.085 * max(len(run.scenario.name) for run in runs)
    width = PANELS_WIDTH + names
    figure = open_figures()(figsize=(width, height), dpi=150, facecolor="white")
    widths = (3, 3, 2, 2, 2) if setup.priced else (3, 3, 2.5, 2.5)
    axes = figure.subplots(1, len(widths), sharey=True, width_ratios=widths)
    figure.subplots_adjust(
        left=names / width,
        right=1 - 0.2 / width,
        top=1 - (head + 0.45) / height,
        bottom=(0.5 + below) / height,
        wspace=0.17,
    )
    _times(axes[0], runs, lambda results: results.ttft_s, 1.0, setup.slo.ttft_s, "time to first token, s")
    between = "between tokens, mean of a request, ms"
    _times(axes[1], runs, lambda results: results.request_itl_s, 1e3, setup.slo.itl_s * 1e3, between)
    _bars(axes[2], runs, lambda results: 100 * results.kept_share, "{:.0f}", "within the SLO, %")
    _bars(axes[3], runs, lambda results: results.goodput_per_gpu, "{:.3g}", "goodput: of those, /s/GPU")
    if setup.priced:
        _bars(axes[4], runs, lambda results: results.usd_per_million_output_tokens, "{:.2f}", "USD per M output tokens")
    axes[0].set_yticks(range(len(runs)), [run.scenario.name for run in runs], fontsize=9.5, color=INK)
    for label, run in zip(axes[0].get_yticklabels(), runs, strict=True):
        label.set_color(COLOURS[run.scenario.mode])
        label.set_fontweight("bold" if run.scenario.policy == "ours" else "normal")
    axes[0].set_ylim(len(runs) - 0.4, -0.6)
    for number, run in enumerate(sized):
        bottom = (0.35 + below - (number + 1) * SIZES_HEIGHT) / height
        box = (names / width, bottom, 1 - (names + 0.2) / width, (SIZES_HEIGHT - 0.9) / height)
        _sizes(figure.add_axes(box), run)
    left = 0.17 / width
    # A long headline would leave the picture: DejaVu's bold letters are about 0.65 of their size wide.
    size = min(13.5, (width - 0.34) * 72 / (0.65 * max(1, len(headline))))
    figure.text(left, 1 - 0.33 / height, headline, fontsize=size, fontweight="bold", color=INK, va="center")
    for number, line in enumerate(lines):
        at = 1 - (0.64 + 0.23 * number) / height
        figure.text(left, at, line, fontsize=9.5, color="#5d6770", va="center")
    figure.savefig(path, format="png")


def _subtitle(runs: Sequence[Run], setup: Setup, trace: str) -> list[str]:
    requests = max(run.results.requests for run in runs)
    details = [] if setup.calibration is not None else [f"TP {setup.tp}{setup.beyond_tp}"]
    details += [f"{setup.price:g} USD/h each"] if setup.priced else []
    lines = [
        f"{trace}: {requests:,} requests, {setup.hardware_name}" + (f" ({', '.join(details)})" if details else ""),
        f"SLO: first token within {setup.slo.ttft_s:g} s, {setup.slo.itl_s * 1e3:g} ms between tokens in the mean of a"
        " request.  Simulated; dots: p50, p95, p99; dashed: the SLO",
    ]
    caveat = setup.calibration.caveat if setup.calibration is not None else ""
    return [*lines, caveat] if caveat else lines


def _times(
    axes: Any,
    runs: Sequence[Run],
    spread_of: Callable[[Results], LatencySummary],
    unit: float,
    limit: float,
    title: str,
) -> None:
    """Plot ranges from p50 to p99 on a logarithmic scale."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for row, run in enumerate(runs):
        spread, colour = spread_of(run.results), COLOURS[run.scenario.mode]
        values = [unit * value for value in (spread.p50, spread.p95, spread.p99)]
        axes.plot((values[0], values[2]), (row, row), color=colour, linewidth=3, alpha=0.35, solid_capstyle="round")
        axes.scatter(values, [row] * 3, s=(48, 26, 26), color=colour, zorder=3)
        axes.annotate(
            f"{values[2]:.3g}",
            (values[2], row),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 0.8},
            zorder=4,
        )
    axes.axvline(limit, color="#c0392b", linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    low, high = min(low, limit * 0.9), max(high, limit * 1.1)
    axes.set_xlim(low, high * (high / low) ** 0.18)  # for the last label
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    _tidy(axes, title)


def _bars(axes: Any, runs: Sequence[Run], value_of: Callable[[Results], float], form: str, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    values = [value_of(run.results) for run in runs]
    finite = [value if value < float("inf") else 0.0 for value in values]
    colours = [COLOURS[run.scenario.mode] for run in runs]
    axes.barh(range(len(runs)), finite, height=0.55, color=colours, alpha=0.85)
    for row, value in enumerate(finite):
        axes.annotate(
            form.format(values[row]), (value, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_xlim(0, max([*finite, 1e-9]) * 1.22)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    _tidy(axes, title)


def _sizes(axes: Any, run: Run) -> None:
    """Plot workers over time, with those still starting."""
    times = [size.at_s for size in run.sizes]
    colours = (("prefill", "#1f77b4"), ("decode", "#d08a2c"), ("starting", "#9aa5af"))
    for name, colour in colours:
        axes.step(times, [getattr(size, name) for size in run.sizes], color=colour, where="post", label=name)
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    axes.set_ylim(bottom=0)
    _tidy(axes, f"{run.scenario.name}: workers, by seconds of the trace")


def _tidy(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=9.5, loc="left", color=INK, pad=8)
    axes.grid(axis="x", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8, colors=INK)
    axes.tick_params(axis="x", which="minor", bottom=False)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
