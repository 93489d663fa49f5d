"""Findings of published papers, repeated in the simulator: where disaggregation gains, and where it does not.

`python -m bench.known_results [NAME]`: all cases, or those whose name contains NAME.

Goodput is DistServe's: the highest rate at which 90 % of the requests keep TTFT and ITL, for each GPU, or for each USD
where the GPUs differ. It is found to within RATIO by bisection between a rate that is kept and one that is not, of one
trace, starting from the estimate of `tandem plan`'s formulas; the best of several splits counts. Both clusters are
about equally large or expensive, unless DistServe's artifact fixes them. Both sides have the same router and the same
engine, unless the two engines' step times are those that DistServe's authors measured.

There are two aggregated baselines. The papers compared with engines that computed a prompt in one step, while all
running streams waited (`whole prompts`); today's engines, Tandem's too, compute it in chunks beside the streams
(`chunks`).
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from bench.known_cases import CASES, Case, with_whole_prompts
from bench.support.report import Bar, conclude
from simulator.comparison.advice import MARGIN
from simulator.comparison.replay import Scenario, Setup, bill, replay
from simulator.plan.aggregated import AggregatedPlan
from simulator.plan.check import requests_of
from simulator.plan.load import Load
from simulator.plan.search import GOAL, MODEL_ERROR, apart_of

RATIO = 1.1
LEAST = 0.02
"""Requests/s for each worker; a cluster that misses the SLO at this rate has no goodput."""


def goodput(case: Case, setup: Setup, scenario: Scenario) -> float:
    """Return requests/s at the highest rate at which GOAL of them keep the SLO; 0 if no tried rate does."""
    if case.fixed:
        return case.load.rate * kept(case, setup, scenario, case.load.rate)
    workers = scenario.prefill + scenario.decode

    def within(rate: float) -> bool:
        return kept(case, setup, scenario, rate) >= GOAL

    low = high = max(LEAST * workers, planned(setup, scenario, case.load))
    if within(low):
        while within(high := 2 * high):
            low = high
    else:
        while not within(low := low / 2):
            high = low
            if low < LEAST * workers:
                return 0.0
    while high / low > RATIO:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def kept(case: Case, setup: Setup, scenario: Scenario, rate: float) -> float:
    """Return the share of requests within the SLO, of a trace of five stream lifetimes or of 800 requests."""
    count = max(case.count, min(800, round(5 * rate * case.load.output * setup.slo.itl_s)))
    trace = case.requests(dataclasses.replace(case.load, rate=rate), count)
    return replay(setup, scenario, trace).results.kept_share


def planned(setup: Setup, scenario: Scenario, load: Load) -> float:
    """Return the rate by the formulas."""
    low, high = 0.01, 1000.0
    for _ in range(30):
        rate = math.sqrt(low * high)
        sized = dataclasses.replace(load, rate=rate)
        model = apart_of(setup, sized, scenario.prefill, scenario.decode) if scenario.apart else None
        share = (model or AggregatedPlan(setup, sized, scenario.decode)).kept
        low, high = (rate, high) if share >= GOAL else (low, rate)
    return low


def measure(case: Case, advance: Callable[[], object]) -> dict[str, Any]:
    """Return goodput for each USD an hour, and for each GPU, of all clusters of a case."""
    own, together = case.own or case.setup, Scenario("aggregated", 0, case.together)
    clusters = {
        "whole prompts": (with_whole_prompts(own), together),
        "chunks": (own, together),
    }
    for prefill, decode in case.splits:
        clusters[f"{prefill}P:{decode}D"] = (case.setup, Scenario("disaggregated", prefill, decode))
    figures: dict[str, dict[str, float]] = {}
    for name, (setup, scenario) in clusters.items():
        found = goodput(case, setup, scenario)
        gpus, usd_per_hour = bill(setup, scenario)
        figures[name] = {"per_s": found, "per_gpu": found / gpus, "per_usd": 3600 * found / usd_per_hour}
        if as_planned(case):
            figures[name]["formulas / simulated"] = planned(setup, scenario, case.load) / found if found else math.inf
        advance()

    def over(name: str) -> float:
        """Return the ratio to a cluster; one without goodput counts as having the lowest rate tried."""
        gpus, usd_per_hour = bill(*clusters[name])
        least = LEAST * case.together / (gpus if unit == "per_gpu" else usd_per_hour / 3600)
        return figures[best][unit] / max(least, figures[name][unit])

    unit = "per_usd" if case.setup.decode_gpu is not None else "per_gpu"
    best = max((name for name in figures if name.endswith("D")), key=lambda name: figures[name][unit])
    return {
        "clusters": figures,
        "best split": best,
        "unit": unit,
        "over whole prompts": over("whole prompts"),
        "over chunks": over("chunks"),
        **(
            {"formulas / simulated": figures[best]["formulas / simulated"] / figures["chunks"]["formulas / simulated"]}
            if as_planned(case)
            else {}
        ),
    }


def as_planned(case: Case) -> bool:
    """Return whether the requests are as the formulas of `tandem plan` assume them."""
    return case.requests is requests_of and not case.fixed


def bars_of_formulas(figures: dict[str, Any]) -> list[Bar]:
    """Return the bar for the error that `tandem plan` assumes of its formulas' ratio of both kinds of clusters."""
    ratios = [found["formulas / simulated"] for found in figures.values() if "formulas / simulated" in found]
    if not ratios:
        return []
    within = sum(abs(ratio - 1) <= MODEL_ERROR for ratio in ratios) / len(ratios)
    name = f"split / chunks by the formulas, within {MODEL_ERROR:.0%} of the simulated: share of {len(ratios)} settings"
    return [Bar(name, within, 0.85, at_least=True)]


def bars_of(case: Case, measured: dict[str, Any]) -> Iterator[Bar]:
    """Yield the bars for the papers' findings."""
    if case.gains is None:
        return
    if case.gains:
        name = f"{case.name}: goodput {measured['best split']} / aggregated, {case.gains_over}"
        yield Bar(name, measured[f"over {case.gains_over}"], 1 + MARGIN, at_least=True)
    else:
        yield Bar(f"{case.name}: goodput / aggregated, chunks", measured["over chunks"], 1 + MARGIN)


def row_of(name: str, measured: dict[str, Any]) -> str:
    """Return a table row: requests/s for each GPU, or for each 3600 USD an hour."""
    each = ", ".join(f"{cluster} {found[measured['unit']]:.3g}" for cluster, found in measured["clusters"].items())
    return f"| {name} | {each} | {measured['over whole prompts']:.2f} | {measured['over chunks']:.2f} |"


def main() -> None:
    console = Console()
    wanted = [case for case in CASES if all(word in case.name for word in sys.argv[1:])]
    bars: list[Bar] = []
    figures: dict[str, Any] = {}
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        for case in wanted:
            task = progress.add_task(case.name, total=2 + len(case.splits))
            figures[case.name] = measure(case, lambda task=task: progress.advance(task))  # type: ignore[misc]
            bars += bars_of(case, figures[case.name])
            progress.console.print(row_of(case.name, figures[case.name]))
    conclude("known_results", [*bars, *bars_of_formulas(figures)], figures, console)


if __name__ == "__main__":
    main()
