"""Comparison of the simulator with a live cluster, for the same requests.

A live cluster is loaded once, and `tandem calibrate` fits its receipts. Then it is loaded again, with other requests at
another rate, and its clients' latencies are compared with those that `tandem replay` predicts: with sim workers in real
time, and with the torch engine and the demo model.
"""

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench.report import Bar, conclude
from bench.router.site import sim_site
from simulator.calibrate import calibrate
from simulator.calibration import Calibration
from simulator.gpus import gpu_named
from simulator.model_shape import open_shape
from simulator.replay import Scenario, Setup, replay
from simulator.results import Results, Slo
from simulator.traces.reading import Trace, Window, served_of
from simulator.workloads import profile_named
from tandem.cli.calibrate import show_calibration
from tandem.loadgen.command import OfferedLoad, OutputOptions, run_bench
from tandem.loadgen.frontends import GrpcFrontend
from tandem.local.local_cluster import LocalCluster
from tandem.storyteller import STORYTELLER
from tandem.topology import plan_topology

SLO = Slo(1.0, 0.05)
RUN_S = 30.0
SIM = {
    "sim_step_ms": 8,
    "sim_prompt_token_us": 100,
    "sim_prompt_pair_ns": 20,
    "sim_stream_us": 100,
    "sim_kv_token_ns": 200,
    "sim_reads": "last",
}
"""Step times of a worker: about those of a small model on a small GPU."""


@contextlib.asynccontextmanager
async def sim_cluster() -> AsyncIterator[tuple[str, int, int]]:
    """Start a sim cluster; yield its address and its numbers of prefill and decode workers."""
    async with sim_site({}, prefill=2, decode=2, worker=SIM) as site:
        yield site.router.address, 2, 2


@contextlib.asynccontextmanager
async def demo_cluster() -> AsyncIterator[tuple[str, int, int]]:
    settings = {"model": STORYTELLER}
    cores = sorted(os.sched_getaffinity(0))
    async with LocalCluster(plan_topology(1, 1, settings | {"port": 0}, settings, cores)) as cluster:
        yield cluster.address, 1, 1


SITES = {
    "sim workers": (sim_cluster, 0.5, (10.0, 12.0), 0.10),
    "torch, demo model": (demo_cluster, 1.0, (5.0, 6.0), 0.25),
}
"""Per cluster: factor for the profile's lengths, request rates for fitting and for comparing, and the tolerance."""


async def load(console: Console, name: str, folder: Path) -> tuple[Calibration, Results, int, int]:
    """Load the live cluster three times: to warm up, to fit, to compare."""
    site, scale, rates, _ = SITES[name]
    async with site() as (address, prefill, decode):
        for run, rate, seed in (("warmup", rates[0], 3), ("learn", rates[0], 1), ("compare", rates[1], 2)):
            console.print(f"{name}: {run}")
            offered = OfferedLoad(profile_named("short-chat"), rate=rate, duration_s=RUN_S, scale=scale, seed=seed)
            report = await run_bench(
                console, GrpcFrontend([address], "", 120), offered, OutputOptions(SLO, log_path=folder / f"{run}.log")
            )
    found = calibrate(served_of(folder / "learn.log"))
    show_calibration(console, found, folder / "learn.log")
    return found, report.results, prefill, decode


def compare(console: Console, name: str) -> tuple[list[Bar], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        found, live, prefill, decode = uvloop.run(load(console, name, Path(folder)))
        setup = Setup(open_shape(None), gpu_named("H100"), gpus=prefill + decode, slo=SLO, calibration=found)
        trace = Trace(Path(folder) / "compare.log", Window())
        simulated = replay(setup, Scenario("conditional", prefill, decode), trace).results
    bars = []
    for what, label in (("ttft_s", "TTFT"), ("itl_s", "ITL")):
        for share in ("mean", "p90"):
            ratio = getattr(getattr(simulated, what), share) / getattr(getattr(live, what), share)
            bars.append(Bar(f"{name}: {share} {label}, simulated / live - 1", abs(ratio - 1), SITES[name][3]))
    figures = {"calibration": found.model_dump(), "live": asdict(live), "simulated": asdict(simulated)}
    return bars, figures


def main() -> None:
    console = Console()
    bars: list[Bar] = []
    figures: dict[str, Any] = {}
    for name in SITES:
        more, figures[name] = compare(console, name)
        bars += more
    conclude("agreement", bars, figures, console)


if __name__ == "__main__":
    main()
