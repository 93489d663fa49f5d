"""Advice of `tandem replay` where the answer is known: equal clusters, and clusters of which one is clearly better.

`python -m bench.advice`. Equal are two clusters that differ in their seeds only, near the load that they can bear,
where goodput varies most. A seed draws arrival times within the trace's resolution and the router of each request; for
the made-up load it draws all arrivals and lengths. Unequal are cases of `bench.known_cases` and of
docs/should-i-disaggregate.md, at a load that one kind of cluster bears and the other does not.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from bench.known_cases import A10, A100, H100, LLAMA, agents
from bench.report import Bar, conclude
from bench.traces import CONVERSATION, FOLDER, TICK_S
from cluster.garbage_collection import spare_the_started
from simulator.advice import LEVELS, MARGIN, Comparison, Sample, Verdict, sample, settle
from simulator.plan.check import requests_of
from simulator.plan.load import Load
from simulator.replay import Scenario, Setup
from simulator.request import TraceRequest
from simulator.results import Slo
from simulator.traces.reading import Trace, Window

AZURE = FOLDER / "AzureLLMInferenceTrace_conv.csv"
MOST_SEEDS = 4
PAIRS = 5
"""Pairs of equal clusters in each setting."""
STARTS = 2
"""First seeds with which each pair of unequal clusters is compared."""
TraceOf = Callable[[int], Iterable[TraceRequest]]


@dataclass(frozen=True)
class Setting:
    """Load and hardware; the first cluster is compared with the others."""

    name: str
    setup: Setup
    trace_of: TraceOf
    """Trace of a seed."""
    clusters: tuple[Scenario, ...]
    verdict: Verdict = "even"


def mooncake(rate: float, most: int) -> TraceOf:
    return lambda seed: Trace(CONVERSATION, Window(rate=rate, most=most, spread_s=TICK_S, seed=seed))


def azure(rate: float, most: int) -> TraceOf:
    return lambda seed: Trace(AZURE, Window(rate=rate, most=most, spread_s=TICK_S, seed=seed))


def made_up(load: Load, count: int) -> TraceOf:
    """Return other requests for each seed, in the same span of time, as clusters that are compared get them."""

    def trace_of(seed: int) -> Iterable[TraceRequest]:
        requests = list(requests_of(load, count, seed))
        factor = count / load.rate / requests[-1].arrival_s
        return [dataclasses.replace(each, arrival_s=each.arrival_s * factor) for each in requests]

    return trace_of


def together(workers: int) -> Scenario:
    return Scenario("aggregated", 0, workers)


def apart(prefill: int, decode: int) -> Scenario:
    return Scenario("disaggregated", prefill, decode)


STRICT_A100 = Setup(LLAMA, A100, gpus=8, slo=Slo(8, 0.022))
STRICT_H100 = Setup(LLAMA, H100, gpus=4, slo=Slo(1.0, 0.012))
LOOSE_H100 = Setup(LLAMA, H100, gpus=8, slo=Slo(3, 0.05))
CHAT_A10 = Setup(LLAMA, A10, gpus=8, slo=Slo(2, 0.08))
LONG = Load(11, 3000, 200)

EQUAL = (
    Setting("Mooncake's chat, 8 H100", LOOSE_H100, mooncake(1.5, 300), (together(8),)),
    Setting(
        "Mooncake's chat, strict ITL, 4P:4D A100, two routers",
        dataclasses.replace(STRICT_A100, num_routers=2),
        mooncake(0.7, 200),
        (apart(4, 4),),
    ),
    Setting("Azure's chat, 8 A10", CHAT_A10, azure(2.4, 800), (together(8),)),
    Setting("long prompts, strict ITL, 4 H100, other requests", STRICT_H100, made_up(LONG, 600), (together(4),)),
)
UNEQUAL = (
    Setting(
        "Mooncake's chat, strict ITL, 8 A100",
        STRICT_A100,
        mooncake(0.7, 400),
        (together(8), apart(5, 3), apart(4, 4)),
        "disaggregate",
    ),
    Setting(
        "long prompts, strict ITL, 4 H100",
        STRICT_H100,
        made_up(dataclasses.replace(LONG, rate=12), 600),
        (together(4), apart(2, 2)),
        "disaggregate",
    ),
    Setting("Azure's chat, 8 A10", CHAT_A10, azure(2.2, 1200), (together(8), apart(2, 6), apart(4, 4)), "aggregate"),
    Setting(
        "coding agents, KV pools full, 2 H100",
        Setup(LLAMA, H100, gpus=2, slo=Slo(1.0, 0.04)),
        lambda _: agents(Load(2.5, 14_000, 200, hit_rate=0.9, variation=0.0), 400),
        (together(2), apart(1, 1)),
        "aggregate",
    ),
)


def once(setting: Setting, scenario: Scenario, seed: int) -> Sample:
    return sample(dataclasses.replace(setting.setup, seed=seed), scenario, setting.trace_of(seed))


def compare_equal(setting: Setting, pair: int) -> Comparison:
    """Compare one cluster with itself under other seeds, as `tandem replay` compares two."""
    (scenario,) = setting.clusters
    seed = 2 * MOST_SEEDS * pair

    def again(place: int, number: int) -> Sample:
        return once(setting, scenario, seed + place * MOST_SEEDS + number)

    return settle([again(0, 0), again(1, 0)], MOST_SEEDS, again)


def compare_unequal(setting: Setting, start: int) -> Comparison:
    def again(place: int, number: int) -> Sample:
        return once(setting, setting.clusters[place], MOST_SEEDS * start + number)

    return settle([again(place, 0) for place in range(len(setting.clusters))], MOST_SEEDS, again)


def by_one_run(found: Comparison) -> Verdict:
    """Return what the first seed says without an interval."""
    change = found.split_by_seed[0] / found.together_by_seed[0] - 1 if found.together_by_seed[0] else float("inf")
    return "even" if abs(change) <= MARGIN else "disaggregate" if change > 0 else "aggregate"


def measure(
    progress: Progress, settings: Iterable[Setting], count: int, compare: Callable[[Setting, int], Comparison]
) -> list[dict[str, Any]]:
    rows = []
    for setting in settings:
        task = progress.add_task(setting.name, total=count)
        for number in range(count):
            began_s = time.monotonic()
            found = compare(setting, number)
            row = {
                "setting": setting.name,
                "known": setting.verdict,
                "verdict": found.verdict,
                "by one run": by_one_run(found),
                **found.as_json(),
                "seconds": time.monotonic() - began_s,
            }
            lower, upper = found.interval
            progress.console.print(
                f"{setting.name}: {found.verdict}, {found.change:+.1%} ({lower:+.1%} to {upper:+.1%}),"
                f" {row['seeds']} seeds, {row['seconds']:.0f} s; by one run: {row['by one run']}"
            )
            rows.append(row)
            progress.advance(task)
    return rows


def main() -> None:
    console = Console()
    spare_the_started()  # as `tandem replay` does
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        equal = measure(progress, EQUAL, PAIRS, compare_equal)
        unequal = measure(progress, UNEQUAL, STARTS, compare_unequal)
    right = sum(row["verdict"] == row["known"] for row in unequal)
    least = round((1 - LEVELS[0]) * len(equal))
    bars = [
        Bar(
            f"{len(equal)} pairs of equal clusters: advice is even",
            sum(row["verdict"] == "even" for row in equal),
            least,
            at_least=True,
        ),
        Bar(f"{len(unequal)} pairs of unequal clusters: advice is the better one", right, len(unequal), at_least=True),
    ]
    simple = sum(row["by one run"] == "even" for row in equal)
    console.print(f"by one run without an interval: even for {simple} of {len(equal)} equal pairs")
    conclude("advice", bars, {"equal": equal, "unequal": unequal}, console)


if __name__ == "__main__":
    main()
