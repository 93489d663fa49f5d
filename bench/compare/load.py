"""Load from aiperf: three profiles at three rates against every system, and the CPU that is not the engine's."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.clients.load_tools import LOAD_BIN, run_tool
from bench.compare.systems import MODEL_NAME, CannotRun, Machine, System, systems
from bench.compare.workload import PROFILES, write_rows
from bench.support.report import Bar

SHARES = (0.3, 0.6, 0.9)
RUN_S = 10.0
SATURATING, SATURATING_REQUESTS = 24, 48
SLO_TTFT_MS, SLO_ITL_MS = 1000.0, 60.0
MIN_GOODPUT, MIN_SHARED = 1.0, 1.15
OURS = "Tandem on vllm"
FASTEST = "Tandem on torch, 2 aggregated"
"""System that is measured first: the rates are shares of its saturation. No other has had more requests/s."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one run of aiperf."""

    requests: int
    failed: int
    ttft_mean_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    itl_p99_ms: float
    requests_per_s: float
    goodput: float
    """Requests per second within both objectives."""
    tokens: int
    """Output tokens."""
    other_cpu_s: float
    """CPU seconds of all processes but the engines, for 1,000 output tokens."""
    engine_cpu_s: float


async def aiperf(system: System, rows: Path, *options: str) -> Figures:
    """Run aiperf over the rows. Raises CannotRun when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(LOAD_BIN / "aiperf"), "profile", "-m", MODEL_NAME, "--url", system.url]
        command += [
            "--endpoint-type",
            "completions",
            "--streaming",
            "--tokenizer",
            str(system.machine.model),
        ]
        command += ["--input-file", str(rows), "--custom-dataset-type", "mooncake_trace"]
        command += ["--use-legacy-max-tokens", "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
        command += ["--goodput", f"time_to_first_token:{SLO_TTFT_MS:g} inter_token_latency:{SLO_ITL_MS:g}"]
        # its collectors of servers' metrics take the engines' cores, and a run ends with an error when one is starved
        command += ["--no-server-metrics", "--no-gpu-telemetry"]
        command += ["--ui", "none", "--output-artifact-dir", folder, *options]
        engine_s, other_s = system.cpu_s()
        code, said = await run_tool(command, Path(folder))
        results = Path(folder) / "profile_export_aiperf.json"
        if code != 0 or not results.exists():
            raise CannotRun(f"{system.name}: aiperf failed: {said[-600:]}")
        found = json.loads(results.read_text())
    engine_end_s, other_end_s = system.cpu_s()
    tokens = int(found["total_osl"]["avg"])
    return Figures(
        requests=int(found["request_count"]["avg"]),
        failed=sum(each["count"] for each in found["error_summary"]),
        ttft_mean_ms=found["time_to_first_token"]["avg"],
        ttft_p99_ms=found["time_to_first_token"]["p99"],
        itl_mean_ms=found["inter_token_latency"]["avg"],
        itl_p99_ms=found["inter_token_latency"]["p99"],
        requests_per_s=found["request_throughput"]["avg"],
        goodput=found.get("goodput", {"avg": 0.0})["avg"],
        tokens=tokens,
        other_cpu_s=1e3 * (other_end_s - other_s) / tokens,
        engine_cpu_s=1e3 * (engine_end_s - engine_s) / tokens,
    )


async def saturation(system: System, scratch: Path, profile: str, seed: int) -> Figures:
    """Return the figures of a system with SATURATING requests at any time."""
    rows = scratch / f"saturation-{profile}-{seed}.jsonl"
    write_rows(rows, list(PROFILES[profile](SATURATING_REQUESTS, seed)), 1.0, seed)
    count = ("--request-count", str(SATURATING_REQUESTS), "--concurrency", str(SATURATING))
    return await aiperf(system, rows, "--no-fixed-schedule", *count)


async def measure(machine: Machine, scratch: Path, console: Console, only: Sequence[str] = ()) -> dict[str, Any]:
    """Measure every system: its saturation, then all runs at rates of the first one's, which is the fastest."""
    figures: dict[str, Any] = {"cannot run": {}, "saturation": {}, "runs": {}}
    chosen = [each for each in systems(machine) if not only or any(name in each.name for name in only)]
    best: dict[str, float] = {}
    found, runs = figures["saturation"], figures["runs"]
    for system in sorted(chosen, key=lambda each: each.name != FASTEST):
        try:
            async with system:
                await saturation(system, scratch, "short-chat", 90)  # warms up
                found[system.name] = {
                    profile: (await saturation(system, scratch, profile, 80 + number)).requests_per_s
                    for number, profile in enumerate(PROFILES)
                }
                console.print(system.name, found[system.name])
                best = best or found[system.name]
                runs[system.name] = {}
                await _run_cases(system, best, scratch, figures, console)
        except (CannotRun, KeyError) as error:
            figures["cannot run"][system.name] = str(error)
            console.print(system.name, error, markup=False)
    return figures


async def _run_cases(
    system: System, best: dict[str, float], scratch: Path, figures: dict[str, Any], console: Console
) -> None:
    """Measure a running system at each share of the `best` one's saturation; a case that fails loses only itself."""
    for number, profile in enumerate(PROFILES):
        for share in SHARES:
            rate, case = share * best[profile], f"{profile} {share:g}"
            asks = list(PROFILES[profile](max(8, round(RUN_S * rate)), 10 * number + int(10 * share)))
            rows = scratch / "rows.jsonl"
            write_rows(rows, asks, rate, int(100 * share))
            try:
                run = await aiperf(system, rows, "--fixed-schedule")
            except (CannotRun, KeyError) as error:
                figures["cannot run"][f"{system.name}, {case}"] = str(error)
                console.print(system.name, case, error, markup=False)
                continue
            figures["runs"][system.name][case] = asdict(run)
            console.print(system.name, case, run)


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars: goodput of the better of Tandem's two shapes on vLLM / the best other system's."""
    bars = []
    for profile in PROFILES:
        for share in SHARES:
            key = f"{profile} {share:g}"
            ours = [runs[key]["goodput"] for name, runs in figures["runs"].items() if OURS in name and key in runs]
            others = [
                runs[key]["goodput"] for name, runs in figures["runs"].items() if "Tandem" not in name and key in runs
            ]
            if ours and others and max(others):
                limit = MIN_SHARED if profile == "conversation" else MIN_GOODPUT
                what = f"{profile} at {share:g} of the best one's saturation: goodput / the best other system's"
                bars.append(Bar(what, max(ours) / max(others), limit, at_least=True))
    return bars
