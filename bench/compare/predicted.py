"""Does disaggregation pay here? Live pairs of an aggregated and a disaggregated cluster beside what replay predicted.

Both clusters have two workers of Tandem's engine, a core each. Each is calibrated by a run of its own; then `tandem
replay` predicts, from the arrivals of a case alone, what both will do with it.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.compare.systems import Machine, Tandem
from bench.report import Bar
from simulator.calibration import Calibration
from simulator.fitting import calibrate
from simulator.gpus import gpu_named
from simulator.model_shape import open_shape
from simulator.replay import Mode, Scenario, Setup, replay
from simulator.results import Results, Slo
from simulator.traces.reading import Trace, Window, served_of
from simulator.workloads import profile_named
from tandem.loadgen.command import OfferedLoad, OutputOptions, run_bench
from tandem.loadgen.frontends import GrpcFrontend

SLO = Slo(1.0, 0.06)
PROFILES = {"short-chat": 0.5, "tool-calling": 0.15, "offline-batch": 0.4}
"""Profiles with the factor of their lengths."""
SHARES = (0.3, 0.6, 0.9)
LEARN_S, RUN_S, SATURATING = 10.0, 12.0, 16
SHAPES: dict[str, tuple[Mode, int, int]] = {"aggregated": ("aggregated", 0, 2), "disaggregated": ("conditional", 1, 1)}
EVEN = 0.05
"""Relative difference of mean TTFTs below which neither cluster is the winner."""
MIN_RIGHT, MAX_ERROR = 0.9, 0.2


async def _load(console: Console, address: str, log: Path, **load: Any) -> Results:
    offered, options = OfferedLoad(**load), OutputOptions(SLO, log_path=log)
    return (await run_bench(console, GrpcFrontend([address], "", 120), offered, options)).results


async def _live(
    machine: Machine, shape: str, rates: dict[str, float], folder: Path, console: Console
) -> tuple[Calibration, dict[str, Results]]:
    """Load one cluster: a run for the calibration, then every case; `rates` are found by the first cluster."""
    quiet = Console(quiet=True)
    found: dict[str, Results] = {}
    async with Tandem(machine, "torch", *SHAPES[shape][1:]) as system:
        address = system.address
        for name, scale in PROFILES.items():
            load = {"profile": profile_named(name), "scale": scale, "duration_s": LEARN_S / 2}
            results = await _load(quiet, address, folder / "warm.log", **load, concurrency=SATURATING, seed=50)
            rates.setdefault(name, results.finished / results.duration_s)
        learnt = folder / f"{shape}-learn.log"
        with learnt.open("w") as whole:
            for number, (name, scale) in enumerate(PROFILES.items()):
                load = {"profile": profile_named(name), "scale": scale, "duration_s": LEARN_S}
                part = folder / "part.log"
                await _load(quiet, address, part, **load, rate=0.5 * rates[name], seed=60 + number)
                whole.write(part.read_text())
        for number, (name, scale) in enumerate(PROFILES.items()):
            for share in SHARES:
                load = {"profile": profile_named(name), "scale": scale, "duration_s": RUN_S}
                log = folder / f"{shape}-{name}-{share:g}.log"
                seed = 10 * number + int(10 * share)
                found[f"{name} {share:g}"] = await _load(
                    quiet, address, log, **load, rate=share * rates[name], seed=seed
                )
                console.print(shape, name, share, f"TTFT {found[f'{name} {share:g}'].ttft_s.mean:.3f} s")
    return calibrate(served_of(learnt)), found


def _winner(aggregated_s: float, disaggregated_s: float) -> str:
    if abs(aggregated_s - disaggregated_s) <= EVEN * max(aggregated_s, disaggregated_s):
        return "even"
    return "aggregated" if aggregated_s < disaggregated_s else "disaggregated"


async def measure(machine: Machine, console: Console) -> dict[str, Any]:
    """Return each case with what was predicted and what was measured."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, rates = Path(name), dict[str, float]()
        live = {shape: await _live(machine, shape, rates, folder, console) for shape in SHAPES}
        for case in live["aggregated"][1]:
            profile, share = case.split()
            row: dict[str, Any] = {"rate": float(share) * rates[profile]}
            for shape, (found, measured) in live.items():
                setup = Setup(open_shape(None), gpu_named("H100"), gpus=2, slo=SLO, calibration=found)
                trace = Trace(folder / f"aggregated-{profile}-{share}.log", Window())
                predicted = replay(setup, Scenario(*SHAPES[shape]), trace).results
                row[shape] = {
                    "ttft_ms": 1e3 * measured[case].ttft_s.mean,
                    "predicted_ttft_ms": 1e3 * predicted.ttft_s.mean,
                    "itl_ms": 1e3 * measured[case].itl_s.mean,
                    "predicted_itl_ms": 1e3 * predicted.itl_s.mean,
                }
            row["winner"] = _winner(*(row[shape]["ttft_ms"] for shape in SHAPES))
            row["predicted_winner"] = _winner(*(row[shape]["predicted_ttft_ms"] for shape in SHAPES))
            figures[case] = row
            console.print(case, json.dumps(row))
        return {
            "cases": figures,
            "calibrations": {shape: found.model_dump(mode="json") for shape, (found, _) in live.items()},
        }


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars; a winner that is even by measurement or prediction counts as right with either."""
    cases = figures["cases"].values()
    right = [
        row["winner"] == row["predicted_winner"] or "even" in (row["winner"], row["predicted_winner"]) for row in cases
    ]
    bars = [
        Bar(f"winner of {len(right)} pairs predicted by replay: share right", sum(right) / len(right), MIN_RIGHT, True)
    ]
    for what in ("ttft_ms", "itl_ms"):
        errors = sorted(
            abs(row[shape][f"predicted_{what}"] / row[shape][what] - 1) for row in cases for shape in SHAPES
        )
        label = what.removesuffix("_ms").upper()
        bars.append(
            Bar(f"mean {label}, predicted / measured - 1: median of the runs", errors[len(errors) // 2], MAX_ERROR)
        )
        bars.append(Bar(f"mean {label}: the worst of the runs", errors[-1], MAX_ERROR))
    return bars
