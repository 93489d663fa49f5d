"""`make bench-neighbours`, or `python -m bench.neighbours ATTACK ...`: a good tenant beside one that attacks.

The good tenant runs 8 streams and sends a request every 200 ms, in turns with and without the attack. All share two
cores, so a control shows what an attacker's own work costs: the same attack on another router, which refuses its key.
"""

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from bench.neighbours.attacks import ATTACKS
from bench.support.report import Bar, conclude, percentile
from preprocessor.config import PreprocessorConfig
from protos import inference_pb2 as pb
from router.security.api_keys import entry_for
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster, start_role, stop_process
from tandem.storyteller import STORYTELLER
from tandem.topology import plan_topology

PHASE_S = float(os.environ.get("TANDEM_NEIGHBOURS_S", "8"))
ROUNDS = 2
STREAMS, STREAM_TOKENS, EVERY_S, SHORT_TOKENS = 8, 1500, 0.2, 4
STORY = "Once upon a time there was a little fox who lived in the forest. "
LIMITS = {"mallory": {"requests_per_s": 1, "max_running": 1, "tokens_per_minute": 5000, "quota_tokens": 20_000_000}}
SETTLE_S = 30.0
SHAPES = Path("examples/shapes/model").resolve()
MEDIA_PYTHON = Path(".venv-vllm/bin/python-media").resolve()
MIB = 1 << 20


@dataclass
class Phase:
    """Measurements of the good tenant and of the router during one phase."""

    gaps_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    num_failed: int = 0
    failures: list[str] = field(default_factory=list)
    stall_s: float = 0.0
    """Upper bound of the longest lag of the router's loop."""
    lost: int = 0
    rss: int = 0
    """Largest memory of the router, in bytes."""


class GoodTenant:
    """Requests of the tenant within its limits."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def run(self, phase: Phase) -> None:
        """Send requests for PHASE_S."""
        async with asyncio.TaskGroup() as tasks:
            over_at = time.monotonic() + PHASE_S
            streams = [tasks.create_task(self._stream(number, phase)) for number in range(STREAMS)]
            number = 0
            while time.monotonic() < over_at:
                tasks.create_task(self._short(number, phase))
                number += 1
                await asyncio.sleep(EVERY_S)
            for stream in streams:
                stream.cancel()

    async def _stream(self, number: int, phase: Phase) -> None:
        sampling = pb.Sampling(max_tokens=STREAM_TOKENS, temperature=0, ignore_eos=True)
        while True:
            last = 0.0
            try:
                async for _ in self._client.generate(f"{number} {STORY}", sampling=sampling, model="model"):
                    now = time.monotonic()
                    if last:
                        phase.gaps_ms.append(1e3 * (now - last))
                    last = now
            except Exception as error:
                self._failed(error, phase)
                await asyncio.sleep(0.1)

    async def _short(self, number: int, phase: Phase) -> None:
        sampling = pb.Sampling(max_tokens=SHORT_TOKENS, temperature=0, ignore_eos=True)
        began_at, first = time.monotonic(), True
        try:
            async for _ in self._client.generate(f"{number} {STORY * 4}", sampling=sampling, model="model"):
                if first:
                    phase.ttft_ms.append(1e3 * (time.monotonic() - began_at))
                    first = False
        except Exception as error:
            self._failed(error, phase)

    def _failed(self, error: Exception, phase: Phase) -> None:
        phase.num_failed += 1
        phase.failures.append(f"{type(error).__name__}: {error}"[:200])


class Site:
    """The cluster under attack, and a router that refuses the attacker's key, for the control."""

    def __init__(self, folder: Path, cores: Sequence[int], preprocessor: str) -> None:
        """Create it; `preprocessor` is the address of one for pictures."""
        keys = folder / "keys.yaml"
        keys.write_text("".join(entry_for(f"tk-{name}", name, name, [], None) for name in ("alice", "mallory")))
        router: dict[str, Any] = {
            "models": [
                {"path": STORYTELLER, "name": "model"},
                {"path": SHAPES, "name": "seeing", "preprocessor": preprocessor},
            ],
            "port": 0,
            "http_port": 0,
            "internal_port": 0,
            "metrics_port": 0,
            "batches_folder": folder / "batches",
            "api_keys_file": keys,
            "isolate_tenants": True,
            "tenants": LIMITS,
        }
        worker = {"model": STORYTELLER, "kv_memory_mib": 256}
        self.cluster = LocalCluster(plan_topology(1, 1, router, worker, cores, 1))
        self.other = LocalCluster(plan_topology(0, 1, router, worker | {"engine": "sim"}, cores, 1))

    async def metrics(self) -> dict[str, Any]:
        """Return the router's buckets of loop lags, and workers lost."""
        address = self.cluster.router.metrics_address
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as answer:
            text = await answer.text()
        lags: dict[float, float] = {}
        lost = 0.0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "tandem_event_loop_lag_seconds_bucket":
                    lags[float(sample.labels["le"])] = sample.value
                elif sample.name == "tandem_workers_lost_total":
                    lost += sample.value
        return {"lags": lags, "lost": lost}

    @property
    def rss(self) -> int:
        return psutil.Process(self.cluster.router.process.pid).memory_info().rss


def longest_lag(before: dict[float, float], after: dict[float, float]) -> float:
    """Return the upper bound of the longest lag between two readings of the histogram, in seconds."""
    counts = {bound: after[bound] - before[bound] for bound in after}
    total = max(counts.values())
    return min(bound for bound, count in counts.items() if count == total)


@asynccontextmanager
async def attacking(name: str, grpc_address: str, http_address: str, key: str) -> AsyncIterator[None]:
    """Attack from another process within the block."""
    command = [sys.executable, "-m", "bench.neighbours.attacks", name, grpc_address, http_address, key]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        await asyncio.sleep(1.5)  # its imports
        yield
        if process.returncode is not None:
            raise RuntimeError(f"the attack {name} ended by itself with {process.returncode}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def measured(site: Site, tenant: GoodTenant) -> Phase:
    """Measure one phase of the good tenant."""
    phase = Phase()
    before = await site.metrics()

    async def watch_memory() -> None:
        while True:
            phase.rss = max(phase.rss, site.rss)
            await asyncio.sleep(0.05)

    watching = asyncio.ensure_future(watch_memory())
    await tenant.run(phase)
    watching.cancel()
    after = await site.metrics()
    phase.stall_s = longest_lag(before["lags"], after["lags"])
    phase.lost = int(after["lost"] - before["lost"])
    return phase


async def compare(site: Site, tenant: GoodTenant, name: str, console: Console) -> dict[str, Any]:
    """Measure an attack: quiet phases, phases under attack, and a control, in turns."""
    quiet, attacked, control = list[Phase](), list[Phase](), list[Phase]()
    router, other = site.cluster.router, site.other.router
    for _ in range(ROUNDS):
        quiet.append(await measured(site, tenant))
        async with attacking(name, router.address, router.http_address, "tk-mallory"):
            attacked.append(await measured(site, tenant))
        async with attacking(name, other.address, other.http_address, "tk-nobody"):
            control.append(await measured(site, tenant))
    ended_at = time.monotonic()
    while (left := (site.rss - quiet[0].rss) / MIB) > 64 and time.monotonic() - ended_at < SETTLE_S:  # noqa: ASYNC110
        await asyncio.sleep(0.5)

    def of(phases: list[Phase], values: str, share: float) -> float:
        return statistics.median(percentile(getattr(phase, values), share) for phase in phases)

    figures: dict[str, Any] = {
        "failed": sum(phase.num_failed for phase in attacked),
        "failures": sorted({text for phase in attacked for text in phase.failures})[:3],
        "stall_s": max(phase.stall_s for phase in attacked),
        "quiet_stall_s": max(phase.stall_s for phase in quiet),
        "lost": sum(phase.lost for phase in attacked),
        "memory_mib": (max(phase.rss for phase in attacked) - max(phase.rss for phase in quiet)) / MIB,
        "memory_after_mib": left,
    }
    for what, values in (("itl", "gaps_ms"), ("ttft", "ttft_ms")):
        figures[f"{what}_ms"] = of(quiet, values, 0.99)
        figures[f"{what}_ratio"] = of(attacked, values, 0.99) / of(quiet, values, 0.99)
        figures[f"{what}_control"] = of(control, values, 0.99) / of(quiet, values, 0.99)
    console.print(f"{name}:", figures)
    return figures


def bars_of(figures: dict[str, dict[str, Any]]) -> list[Bar]:
    bars = []
    for name, found in figures.items():
        for what in ("itl", "ttft"):
            said = f"{name}: {what.upper()} p99 / without (control: {found[f'{what}_control']:.2f})"
            bars.append(Bar(said, found[f"{what}_ratio"], 1.5))
        bars.append(Bar(f"{name}: longest stall of the router's loop, s", found["stall_s"], 0.1))
        bars.append(Bar(f"{name}: good tenant's requests refused or failed", found["failed"], 0))
        bars.append(Bar(f"{name}: router's memory beyond quiet, MiB", found["memory_mib"], 256))
        bars.append(Bar(f"{name}: the same within {SETTLE_S:g} s afterwards", found["memory_after_mib"], 64))
        bars.append(Bar(f"{name}: workers declared lost", found["lost"], 0))
    return bars


async def main(attacks: Sequence[str]) -> None:
    console = Console(width=160)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("error: cores: a prefill and a decode engine need two")
    figures: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-neighbours-")))
        settings = {"models": {"seeing": SHAPES}, "vllm_python": MEDIA_PYTHON, "port": 0}
        made = await start_role("preprocessor", "preprocessor", PreprocessorConfig.parse(settings | {"processes": 1}))
        stack.push_async_callback(stop_process, made.process)
        site = Site(folder, cores, made.address)
        await stack.enter_async_context(site.cluster)
        await stack.enter_async_context(site.other)
        client = await stack.enter_async_context(Client(site.cluster.address, api_key="tk-alice"))
        tenant = GoodTenant(client)
        await measured(site, tenant)  # the first phase warms up
        for name in attacks:
            try:
                figures[name] = await compare(site, tenant, name, console)
            except Exception:
                console.print_exception()
                failed.append(name)
    conclude("neighbours", bars_of(figures), figures, console)
    if failed:
        sys.exit(f"error: these attacks failed: {', '.join(failed)}")


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(ATTACKS)
    if unknown := set(chosen) - set(ATTACKS):
        sys.exit(f"error: unknown attack {', '.join(unknown)}; known are {', '.join(ATTACKS)}")
    uvloop.run(main(chosen))
