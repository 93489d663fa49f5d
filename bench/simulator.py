"""Speed of the simulator, placement on a real trace in virtual time, and decisions replayed from their log.

`python -m bench.simulator [--quick]`; --quick runs the first 1,500 requests only, to try the benchmark out.
"""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from bench.report import Bar, conclude
from bench.simulator_prefill import (
    EAGER,
    CostPolicy,
    Deaf,
    DeafAlone,
    DeafLeastLoaded,
    DeafRoundRobin,
    Side,
    requests,
    run,
)
from bench.traces import CONVERSATION, TICK_S
from cluster.garbage_collection import spare_the_started
from simulator.decision_log import LoggedFleet, decide_again
from simulator.gpus import gpu_named
from simulator.model_shape import open_shape
from simulator.replay import Scenario, Setup, replay
from simulator.request import TraceRequest
from simulator.traces.reading import Trace, Window

QUICK = 1500
SPEED_REQUESTS = 600
PERFECT: dict[str, Any] = {"lag_s": 0.0, "message_s": 0.0, "admission": EAGER}
SIDES: dict[str, dict[str, Any]] = {
    "cost, perfect knowledge": {"make_fleet": CostPolicy, **PERFECT},
    "ours": {"make_fleet": Deaf},
    "ours, three routers": {"make_fleet": Deaf, "routers": 3},
    "ours, no reading between prefill workers": {"make_fleet": DeafAlone},
    "least loaded, perfect knowledge": {"make_fleet": DeafLeastLoaded, **PERFECT},
    "round robin": {"make_fleet": DeafRoundRobin, **PERFECT},
}


def measure_speed(progress: Progress) -> tuple[list[Bar], dict[str, Any]]:
    """Measure virtual seconds per second of this core's time: 100 H100 with Llama 3.1 8B, 40 of them prefill."""
    setup = Setup(open_shape(None), gpu_named("H100"), gpus=100)
    scenario = Scenario("conditional", 40, 60)
    figures: dict[str, Any] = {}
    cases = [(1.0, False), (1.0, True), (4.0, False), (4.0, True)]
    task = progress.add_task("speed, 100 workers", total=len(cases))
    for rate, skip in cases:
        trace = list(Trace(CONVERSATION, Window(rate=rate, spread_s=TICK_S, most=int(SPEED_REQUESTS * rate))))
        began_s = time.process_time()
        done = replay(dataclasses.replace(setup, skip=skip), scenario, trace).results
        speed = done.duration_s / (time.process_time() - began_s)
        name = f"{rate:g} x the trace's rate, {'runs of steps at once' if skip else 'every step by itself'}"
        figures[name] = {"times_real_time": speed, "output_tokens_per_s": done.output_tokens / done.duration_s}
        progress.advance(task)
    bars = [
        Bar(f"100 workers, {name}: x real time", figure["times_real_time"], 20, at_least=True)
        for name, figure in figures.items()
        if name.startswith("1 x")
    ]
    return bars, figures


def measure_prefill(progress: Progress, trace: Sequence[TraceRequest]) -> tuple[list[Bar], dict[str, Any]]:
    bars: list[Bar] = []
    figures: dict[str, Any] = {}
    for num_workers in (4, 8):
        sides: dict[str, Side] = {}
        for name, settings in SIDES.items():
            task = progress.add_task(f"{num_workers} workers, {name}", total=trace[-1].arrival_s)
            sides[name] = run(
                trace,
                num_workers,
                on_progress=lambda at_s, task=task: progress.update(task, completed=at_s),
                **settings,
            )
            progress.update(task, completed=trace[-1].arrival_s)
        cost, ours, three = (sides[name] for name in list(SIDES)[:3])
        least = sides["least loaded, perfect knowledge"]
        bars += [
            Bar(f"{num_workers} workers: mean TTFT, x the cost policy's", ours.mean_s / cost.mean_s, 1.0),
            Bar(f"{num_workers} workers: p99 TTFT, x the cost policy's", ours.p99_s / cost.p99_s, 1.0),
            Bar(
                f"{num_workers} workers, three routers: mean TTFT, x the cost policy's",
                three.mean_s / cost.mean_s,
                1.05,
            ),
            Bar(f"{num_workers} workers, three routers: p99 TTFT, x the cost policy's", three.p99_s / cost.p99_s, 1.05),
            Bar(f"{num_workers} workers: mean TTFT, x least loaded's", ours.mean_s / least.mean_s, 0.75),
        ]
        figures[f"{num_workers} workers"] = {name: dataclasses.asdict(side) for name, side in sides.items()}
    return bars, figures


def measure_decisions(progress: Progress, limit: int) -> tuple[list[Bar], dict[str, Any]]:
    """Replay all decisions of a cluster that lends, or not, as placement chooses."""
    setup = Setup(open_shape(None), gpu_named("H100"), gpus=12, num_routers=2, event_lag_s=0.05)
    trace = list(Trace(CONVERSATION, Window(spread_s=TICK_S, most=limit, rate=2.0)))
    same = count = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decisions"
        task = progress.add_task("decisions", total=2 * len(trace))
        with path.open("w") as log:
            replay(
                setup,
                Scenario("conditional", 6, 6),
                trace,
                on_end=lambda _: progress.advance(task),
                make_fleet=lambda router_id, priors, learn: LoggedFleet(router_id, priors, learn, log),
            )
        with path.open() as lines:
            for line in lines:
                said, again = decide_again(line)
                same, count = same + (said == again), count + 1
                progress.advance(task)
    bar = Bar(
        f"decisions made again from their snapshots, of {count}: % the same", 100 * same / count, 100, at_least=True
    )
    return [bar], {"decisions": count, "same": same}


def main() -> None:
    console, quick = Console(), "--quick" in sys.argv
    spare_the_started()  # as `tandem replay` does
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        speed_bars, speed = measure_speed(progress)
        prefill_bars, prefill = measure_prefill(progress, requests(QUICK if quick else None))
        decision_bars, decisions = measure_decisions(progress, QUICK)
    figures = {"speed": speed, "prefill": prefill, "decisions": decisions}
    console.print_json(data=figures)
    conclude("simulator", [*speed_bars, *prefill_bars, *decision_bars], figures, console)


if __name__ == "__main__":
    main()
