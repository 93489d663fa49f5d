"""`tandem replay`: a trace through simulated clusters."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from cluster.process.memory import spare_the_started
from sizing.calibration import LoggedFleet
from sizing.cluster.cluster import Failure, FleetMaker
from sizing.cluster.store import StoreSpec
from sizing.comparison.advice import Comparison, Sample, check_seeds, sample, settle
from sizing.comparison.plot import write_plot
from sizing.comparison.replay import MODES, POLICIES, Mode, Policy, Scenario, Setup
from sizing.comparison.report import advice, tables_of, write_json
from tandem.progress import ShareProgress
from workloads.report import open_figures
from workloads.request import BadSetup, TraceRequest, check_above_0, shown

_Word = TypeVar("_Word", bound=str)


def compare(
    console: Console,
    setup: Setup,
    scenarios: Sequence[Scenario],
    trace_of: Callable[[int], Iterable[TraceRequest]],
    most_seeds: int,
    name: str,
    json_path: Path | None,
    png_path: Path | None,
    log_path: Path | None,
) -> Comparison | None:
    """Run all scenarios, print table and advice, and write files.

    `trace_of` returns the trace of a seed. Clusters that decide the advice run with further seeds while it is
    undecided; tables, files and logs are of the first. Raises BadTrace and BadSetup.
    """
    if log_path is not None and not any(_logged(scenario) for scenario in scenarios):
        raise BadSetup(
            "log_decisions", "has no effect: only the policy ours in mode aggregated or conditional logs decisions"
        )
    check_seeds(most_seeds)
    if png_path is not None:
        open_figures()  # so that a missing matplotlib is reported before the work
    spare_the_started()
    trace = trace_of(setup.seed)
    last_s, sequence_tokens = _read_once(console, trace, name)
    setup = replace(setup, sequence_tokens=sequence_tokens)
    with ShareProgress(console) as progress:
        samples = []
        for scenario in scenarios:
            with progress.part(scenario.name, last_s) as advance, _fleet_maker(scenario, log_path) as make_fleet:
                samples.append(sample(setup, scenario, trace, advance, make_fleet))

        def again(scenario: Scenario, number: int) -> Sample:
            seed = setup.seed + number
            with progress.part(f"{scenario.name}, seed {seed}", last_s) as advance:
                return sample(replace(setup, seed=seed), scenario, trace_of(seed), advance)

        compared = _settle(samples, most_seeds, again)
    runs = [each.run for each in samples]
    for table in tables_of(runs, setup):
        console.print(table)
    text = advice(runs, compared)
    if text:
        console.print(text, style="bold")
    for run in runs:
        for reason, count in sorted(run.reasons.items()):
            console.print(f"{run.scenario.name}: {count} x {reason}", style="dim")
    if json_path is not None:
        write_json(json_path, runs, setup, name, compared)
        console.print(f"figures: {json_path}")
    if png_path is not None:
        write_plot(png_path, runs, setup, name, text)
        console.print(f"picture: {png_path}")
    return compared


def seeds_that_differ(repeat: int, spread_s: float, num_routers: int) -> int:
    """Return the largest number of seeds: `repeat`, or 1 where a run draws nothing at random.

    Raises BadSetup.
    """
    check_seeds(repeat)
    return repeat if spread_s > 0 or num_routers > 1 else 1


def _settle(samples: Sequence[Sample], most_seeds: int, again: Callable[[Scenario, int], Sample]) -> Comparison | None:
    """Compare the aggregated cluster with the split ones, all with the same routing; None without both."""
    ours = [each for each in samples if each.run.scenario.policy == "ours" and each.run.scenario.autoscale is None]
    together = [each for each in ours if each.run.scenario.mode == "aggregated"]
    apart = [each for each in ours if each.run.scenario.mode != "aggregated"]
    if not together or not apart:
        return None
    compared = [together[0], *apart]
    return settle(compared, most_seeds, lambda place, number: again(compared[place].run.scenario, number))


def refuse_beside_calibration(options: Sequence[str]) -> None:
    """Refuse options whose values the calibration file already has.

    Raises BadSetup.
    """
    if options:
        raise BadSetup(options[0], "is already set by the calibration file: leave out this option or --calibration")


def parse_splits(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Parse splits.

    Raises BadSetup.
    """
    splits = []
    for text in texts:
        prefill, colon, decode = text.partition(":")
        if not (colon and prefill.isdecimal() and decode.isdecimal()):
            raise BadSetup("split", f"{shown(text)} is not PREFILL:DECODE, such as 2:6")
        splits.append((int(prefill), int(decode)))
    return splits


def parse_modes(text: str) -> list[Mode]:
    """Parse modes.

    Raises BadSetup.
    """
    return [_one_of("modes", word.strip(), MODES) for word in text.split(",")]


def parse_policies(text: str) -> list[Policy]:
    """Parse policies.

    Raises BadSetup.
    """
    return [_one_of("policies", word.strip(), POLICIES) for word in text.split(",")]


def parse_failures(texts: Sequence[str]) -> tuple[Failure, ...]:
    """Parse failures.

    Raises BadSetup.
    """
    failures = []
    for text in texts:
        worker_id, _, at_s = text.rpartition("@")
        try:
            failures.append(Failure(float(at_s), worker_id))
        except ValueError:
            raise BadSetup("kill", f"{shown(text)} is not WORKER@SECONDS, such as decode-0000@60") from None
    return tuple(failures)


def store_of(capacity_tb: float, gb_per_s: float) -> StoreSpec:
    """Return the store for KV that all workers share.

    Raises BadSetup.
    """
    check_above_0("store", capacity_tb)
    check_above_0("store_rate", gb_per_s)
    return StoreSpec(capacity_tb * 1e12, gb_per_s * 1e9)


def _one_of(field: str, word: str, known: tuple[_Word, ...]) -> _Word:
    for each in known:
        if each == word:
            return each
    raise BadSetup(field, f"{shown(word)} is not known; known are {', '.join(known)}")


def _read_once(console: Console, trace: Iterable[TraceRequest], name: str) -> tuple[float, float]:
    """Return the last arrival in seconds, for progress bars, and the mean tokens of a sequence.

    Raises BadTrace before any work.
    """
    last_s, num_tokens, count = 0.0, 0, 0
    with console.status(f"reading {name}"):
        for request in trace:
            last_s, count = request.arrival_s, count + 1
            num_tokens += request.input_tokens + request.output_tokens
    return max(last_s, 1e-9), max(1.0, num_tokens / max(1, count))


def _logged(scenario: Scenario) -> bool:
    return scenario.policy == "ours" and scenario.mode != "disaggregated"


@contextlib.contextmanager
def _fleet_maker(scenario: Scenario, log_path: Path | None) -> Iterator[FleetMaker | None]:
    """Yield the function that makes fleets; with `log_path` their decisions are appended there."""
    if log_path is None or not _logged(scenario):
        yield None
        return
    with log_path.open("a") as log:
        yield lambda router_id, priors, learn_rates: LoggedFleet(router_id, priors, learn_rates, log)
