"""The simulator with the shared store beside a live cluster with it, for the same requests.

Two sim workers whose pools are too small for the conversations; the store is a folder on a local disk. As in
`bench.agreement`, one load is there to learn from: `tandem calibrate` fits step times to its receipts, and a line fits
the durations of its fetches, for the store's latency and bandwidth. Then other requests at another rate are compared.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from bench.agreement import RUN_S, SIM, SLO
from bench.report import Bar
from bench.router.site import sim_site
from simulator.calibrate import AssumedRates, calibrate
from simulator.calibration import Calibration
from simulator.gpus import gpu_named
from simulator.model_shape import open_shape
from simulator.replay import Scenario, Setup, replay
from simulator.results import Results
from simulator.store import StoreSpec
from simulator.traces.reading import Trace, Window, served_of
from simulator.workloads import profile_named
from tandem.loadgen.command import OfferedLoad, OutputOptions, run_bench
from tandem.loadgen.frontends import GrpcFrontend

BLOCK_KIB, POOL_MIB = 64, 40
SCALE, RATES = 1.0, (5.0, 6.0)
"""Factor for the profile's lengths; rates of the load to learn from and of the one that is compared."""
NIC_BYTES_PER_S = 5e9
"""Assumed for links between workers, which hardly lend here."""
TOLERANCE = 0.15


async def load(console: Console, folder: Path) -> tuple[Calibration, Results]:
    """Load the live cluster three times: to fill the store, to learn, to compare."""
    worker = SIM | {"sim_block_kib": BLOCK_KIB, "kv_memory_mib": POOL_MIB}
    worker |= {"kv_store": str(folder / "store"), "kv_store_writes": "computed"}
    async with sim_site({}, prefill=0, decode=2, worker=worker) as site:
        for run, rate, seed in (("warmup", RATES[0], 3), ("learn", RATES[0], 1), ("compare", RATES[1], 2)):
            offered = OfferedLoad(profile_named("short-chat"), rate=rate, duration_s=RUN_S, scale=SCALE, seed=seed)
            options = OutputOptions(SLO, log_path=folder / f"{run}.log")
            report = await run_bench(console, GrpcFrontend([site.router.address], "", 120), offered, options)
    given = AssumedRates(block_bytes=BLOCK_KIB << 10, nic_bytes_per_s=NIC_BYTES_PER_S)
    num_blocks = (POOL_MIB << 10) // BLOCK_KIB
    return calibrate(served_of(folder / "learn.log"), num_blocks, assumed=given), report.results


def store_of(log: Path) -> StoreSpec:
    """Fit latency and bandwidth of the store to the fetches of a log."""
    rows: list[tuple[float, float]] = []
    for served in served_of(log):
        kv = served.receipt.kv
        stages = {stage.name: stage.duration_ms / 1e3 for stage in served.receipt.stages}
        if kv.store_blocks and "fetch from the store" in stages:
            rows.append((kv.store_blocks * BLOCK_KIB * 1024.0, stages["fetch from the store"]))
    num_bytes, seconds = np.array(rows).T
    per_byte, fixed_s = np.polyfit(num_bytes, seconds, 1)
    # a lookup and the beginning of a read are one latency each
    return StoreSpec(1e12, 1 / max(per_byte, 1e-12), max(fixed_s, 1e-4) / 2, writes_at_once=True)


async def measure(progress: Progress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=".bench") as name:
        folder = Path(name)
        found, live = await load(progress.console, folder)
        store = store_of(folder / "learn.log")
        setup = Setup(open_shape(None), gpu_named("H100"), gpus=2, slo=SLO, calibration=found, store=store)
        trace = Trace(folder / "compare.log", Window())
        simulated = replay(setup, Scenario("aggregated", 0, 2), trace).results
        without = Setup(open_shape(None), gpu_named("H100"), gpus=2, slo=SLO, calibration=found)
        bare = replay(without, Scenario("aggregated", 0, 2), trace).results
    figures = {
        "store": asdict(store),
        "live": asdict(live),
        "simulated": asdict(simulated),
        "simulated without the store": asdict(bare),
        "calibration": json.loads(found.model_dump_json()),
    }
    plain: dict[str, Any] = json.loads(json.dumps(figures, default=float))  # numpy's numbers are no JSON
    return plain


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    bars = []
    for share in ("mean", "p90"):
        ratio = figures["simulated"]["ttft_s"][share] / figures["live"]["ttft_s"][share]
        bars.append(Bar(f"{share} TTFT with the store, simulated / live - 1", abs(ratio - 1), TOLERANCE))
    return bars
