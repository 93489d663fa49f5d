"""Output of `tandem plan`: a plan for people, and as JSON."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sizing.comparison.advice import MARGIN
from sizing.comparison.replay import Setup, roofline_of
from sizing.plan.arithmetic import PlanFigure, sections
from sizing.plan.load import OfferedLoad
from sizing.plan.search import GOAL, MODEL_ERROR, Option, Plan, check, plan
from tandem.progress import ShareProgress
from workloads.report import finite
from workloads.request import BadSetup


def needed(name: str, value: float | None) -> float:
    """Return an option of a load.

    Raises BadSetup where it is not given.
    """
    if value is None:
        raise BadSetup(name, f"is missing: describe a load with --{name} and others, or give a chart's --values FILE")
    return value


def make_plan(console: Console, setup: Setup, load: OfferedLoad, num_simulated: int, json_path: Path | None) -> Plan:
    """Compute a plan, print it, simulate it with so many requests, and write files.

    Raises BadSetup.
    """
    if num_simulated < 0:
        raise BadSetup("simulate", f"{num_simulated} is not at least 0")
    made = plan(setup, load)
    slo = f"TTFT {setup.slo.ttft_s:g} s, ITL {setup.slo.itl_s * 1e3:g} ms, both kept by {GOAL:.0%} of the requests"
    console.print(f"{setup.model.name}, {slo}", style="bold")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, justify in (("what", "left"), ("", "right"), ("how", "left")):
        table.add_column(name, justify=justify, no_wrap=name == "", overflow="fold")  # type: ignore[arg-type]
    for name, lines in sections(made):
        table.add_section()
        table.add_row(f"[bold]{name}[/]", "", "")
        for line in lines:
            table.add_row(line.what, figure(line), escape(line.how))
    console.print(table)
    for kind, reason in made.why_not.items():
        console.print(f"{kind}: no cluster keeps the SLO: {reason}")
    simulated = _simulate(console, made, num_simulated) if num_simulated else {}
    console.print(made.advice, style="bold")
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(made) | {"simulated": simulated}, indent=1) + "\n")
        console.print(f"figures: {json_path}")
    return made


def _simulate(console: Console, made: Plan, count: int) -> dict[str, float]:
    """Return, by cluster, the share of simulated requests that keep the SLO."""
    kept = {}
    with ShareProgress(console, transient=True) as progress:
        for option in (made.apart, made.together):
            if option is not None:
                name = option.scenario.name
                with progress.part(f"simulating {name}", count / made.load.rate) as advance:
                    kept[name] = check(option, count, on_progress=advance).results.kept_share
                console.print(
                    f"{name}: {option.model.kept:.1%} by the formulas, {kept[name]:.1%} of {count:,} simulated requests"
                )
    return kept


def figure(line: PlanFigure) -> str:
    """Return a figure with its unit."""
    value = line.value
    if not math.isfinite(value):
        return "-"
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(digits, 3)}f} {line.unit}".rstrip()


def as_json(made: Plan) -> dict[str, Any]:
    """Return the plan as JSON values; values that are not finite are null."""
    return {
        "verdict": made.verdict,
        "advice": made.advice,
        "margin": {"price": MARGIN, "formulas": MODEL_ERROR},
        "why_not": made.why_not,
        "load": {field.name: getattr(made.load, field.name) for field in dataclasses.fields(made.load)},
        "slo": dataclasses.asdict(made.setup.slo),
        "disaggregated": _option(made.apart),
        "aggregated": _option(made.together),
        "arithmetic": {
            name: [
                {"what": each.what, "how": each.how, "value": finite(each.value), "unit": each.unit} for each in lines
            ]
            for name, lines in sections(made)
        },
    }


def _option(option: Option | None) -> dict[str, Any] | None:
    if option is None:
        return None
    setup, scenario = option.setup, option.scenario
    decode = roofline_of(setup, "decode", scenario.apart)
    return {
        "prefill": scenario.prefill,
        "decode": scenario.decode,
        "gpu": setup.gpu.name if scenario.apart else None,
        "tp": setup.tp if scenario.apart else None,
        "decode_gpu": decode.gpu.name,
        "decode_tp": decode.tp,
        "pp": setup.pp,
        "dp": setup.dp,
        "gpus": option.gpus,
        "usd_per_hour": option.usd_per_hour,
        "usd_per_million_output_tokens": option.usd_per_million,
        "kept": option.model.kept,
        "kept_by_part": option.model.parts,
    }
