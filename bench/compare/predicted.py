"""Does disaggregation pay here? Live pairs of an aggregated and a disaggregated cluster beside what replay predicted.

Both clusters have two workers of Tandem's engine, a core each. Each is calibrated by a run of its own; then `tandem
replay` predicts, from the arrivals of a case alone, what both will do with it. Both get the same requests, in turns, so
that their TTFTs are compared request by request. A live winner is one only where the 95 % interval of the difference
says so.
"""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench.compare.systems import Machine, Tandem
from bench.report import Bar
from simulator.advice import BLOCKS, interval_of_best
from simulator.calibrate import calibrate
from simulator.calibration import Calibration
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
LEARN_S, RUN_S, SATURATING = 10.0, 20.0, 16
SHAPES: dict[str, tuple[Mode, int, int]] = {"aggregated": ("aggregated", 0, 2), "disaggregated": ("conditional", 1, 1)}
EVEN = 0.05
"""Relative difference of mean TTFTs below which neither cluster is the winner."""
MISS = 0.05
"""Chance with which an interval may miss."""
MIN_RIGHT, MAX_ERROR = 0.9, 0.2
_Case = tuple[float, dict[str, Results]]
"""Rate of a case, and the results by cluster."""


async def _load(console: Console, address: str, log: Path, **load: Any) -> Results:
    offered, options = OfferedLoad(**load), OutputOptions(SLO, log_path=log)
    return (await run_bench(console, GrpcFrontend([address], "", 120), offered, options)).results


async def _learn(console: Console, address: str, rates: dict[str, float], folder: Path, shape: str) -> Calibration:
    """Calibrate a cluster by a run of its own; `rates` are found by the first cluster."""
    for name, scale in PROFILES.items():
        load = {"profile": profile_named(name), "scale": scale, "duration_s": LEARN_S / 2}
        results = await _load(console, address, folder / "warm.log", **load, concurrency=SATURATING, seed=50)
        rates.setdefault(name, results.finished / results.duration_s)
    learnt = folder / f"{shape}-learn.log"
    with learnt.open("w") as whole:
        for number, (name, scale) in enumerate(PROFILES.items()):
            load = {"profile": profile_named(name), "scale": scale, "duration_s": LEARN_S}
            part = folder / "part.log"
            await _load(console, address, part, **load, rate=0.5 * rates[name], seed=60 + number)
            whole.write(part.read_text())
    return calibrate(served_of(learnt))


async def _live(machine: Machine, folder: Path, console: Console) -> tuple[dict[str, Calibration], dict[str, _Case]]:
    """Run both clusters, in turns: what each was calibrated to, and every case's rate and results."""
    quiet, rates, cases = Console(quiet=True), dict[str, float](), dict[str, _Case]()
    async with contextlib.AsyncExitStack() as stack:
        live = {
            shape: await stack.enter_async_context(Tandem(machine, "torch", num_prefill, num_decode))
            for shape, (_, num_prefill, num_decode) in SHAPES.items()
        }
        learnt = {shape: await _learn(quiet, live[shape].address, rates, folder, shape) for shape in SHAPES}
        for number, (name, scale) in enumerate(PROFILES.items()):
            for share in SHARES:
                key, rate, found = f"{name} {share:g}", share * rates[name], dict[str, Results]()
                load = {"profile": profile_named(name), "scale": scale, "duration_s": RUN_S, "rate": rate}
                for shape, system in live.items():
                    log = folder / f"{shape}-{key}.log"
                    found[shape] = await _load(quiet, system.address, log, **load, seed=10 * number + int(10 * share))
                cases[key] = rate, found
                console.print(key, ", ".join(f"TTFT {shape} {found[shape].ttft_s.mean:.3f} s" for shape in SHAPES))
    return learnt, cases


def _winner(aggregated_s: float, disaggregated_s: float) -> str:
    if abs(aggregated_s - disaggregated_s) <= EVEN * max(aggregated_s, disaggregated_s):
        return "even"
    return "aggregated" if aggregated_s < disaggregated_s else "disaggregated"


def _shown(aggregated: Path, disaggregated: Path) -> str:
    """Return the winner of a live pair by its logs: even, where the difference may be chance."""
    logs = [sorted((each.arrived_s, each.ttft_s) for each in served_of(log)) for log in (aggregated, disaggregated)]
    together, apart = (np.array([ttft_s for _, ttft_s in log]) for log in logs)
    assert len(together) == len(apart), "requests failed"
    num_blocks = min(BLOCKS, len(together))
    starts = np.arange(num_blocks) * len(together) // num_blocks
    blocks = np.add.reduceat(apart - together, starts) / len(together)
    lower, upper = interval_of_best(blocks[None, :, None], MISS)
    return "even" if lower <= 0 <= upper else _winner(float(together.mean()), float(apart.mean()))


async def measure(machine: Machine, console: Console) -> dict[str, Any]:
    """Return each case with what was predicted and what was measured."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        learnt, cases = await _live(machine, folder, console)
        for case, (rate, measured) in cases.items():
            row: dict[str, Any] = {"rate": rate}
            trace = Trace(folder / f"aggregated-{case}.log", Window())
            for shape, found in measured.items():
                setup = Setup(open_shape(None), gpu_named("H100"), gpus=2, slo=SLO, calibration=learnt[shape])
                predicted = replay(setup, Scenario(*SHAPES[shape]), trace).results
                row[shape] = {
                    "ttft_ms": 1e3 * found.ttft_s.mean,
                    "predicted_ttft_ms": 1e3 * predicted.ttft_s.mean,
                    "itl_ms": 1e3 * found.itl_s.mean,
                    "predicted_itl_ms": 1e3 * predicted.itl_s.mean,
                }
            row["winner"] = _shown(*(folder / f"{shape}-{case}.log" for shape in SHAPES))
            row["predicted_winner"] = _winner(*(row[shape]["predicted_ttft_ms"] for shape in SHAPES))
            figures[case] = row
            console.print(case, json.dumps(row))
        calibrations = {shape: found.model_dump(mode="json") for shape, found in learnt.items()}
        return {"cases": figures, "calibrations": calibrations}


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars; winners are predicted of the pairs that have one."""
    cases = figures["cases"].values()
    right = [row["winner"] == row["predicted_winner"] for row in cases if row["winner"] != "even"]
    bars = []
    if right:
        what = (
            f"winner of {len(right)} pairs of {len(cases)} that differ beyond chance, predicted by replay: share right"
        )
        bars.append(Bar(what, sum(right) / len(right), MIN_RIGHT, True))
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
