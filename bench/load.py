"""Load that `tandem bench` can offer from one core, against a server that answers at once on another core."""

import os
import sys
import time
from typing import Any

import uvloop
from rich.console import Console

from bench.report import Bar, conclude
from bench.router.site import first_line, process
from simulator.results import Slo
from simulator.workloads import profile_named
from tandem.loadgen.command import OfferedLoad, OutputOptions, run_bench
from tandem.loadgen.frontends import GrpcFrontend

RATE = 1000.0
RUN_S = 10.0


async def measure() -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    async with process(sys.executable, "-m", "bench.bare_inference") as server:
        address = await first_line(server)
        os.sched_setaffinity(server.pid, cores[1:] or cores)
        os.sched_setaffinity(0, cores[:1])
        offered = OfferedLoad(profile_named("short-chat"), rate=RATE, duration_s=RUN_S)
        began_s = time.process_time()
        report = await run_bench(
            Console(quiet=True), GrpcFrontend([address], "", 60), offered, OutputOptions(Slo(1.0, 0.05))
        )
        cpu_s = time.process_time() - began_s
    results = report.results
    return {
        "finished_per_s": results.finished / results.duration_s,
        "finished_share": results.finished / results.requests,
        "cpu_ms_per_request": 1e3 * cpu_s / results.finished,
        "late_p50_ms": 1e3 * report.late.p50,
        "late_p99_ms": 1e3 * report.late.p99,
    }


def main() -> None:
    console = Console()
    figures = uvloop.run(measure())
    console.print_json(data=figures)
    bars = [
        Bar(f"requests/s finished of {RATE:g} offered, from one core", figures["finished_per_s"], 0.97 * RATE, True),
        Bar("CPU ms of a request", figures["cpu_ms_per_request"], 1.0),
    ]
    conclude("load", bars, figures, console)


if __name__ == "__main__":
    main()
