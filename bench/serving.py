"""`make bench`: the demo model through the whole cluster, and the latency that the cluster adds to a request.

Added latency is time to first token less the engines' computing. Here the `sim` engine's prefill takes no time and its
decode steps take STEP_S without using a core, as a GPU's do. Hops, handshake, transfer and scheduling remain. The
reference is a bare grpc.aio chain of the same hops and messages. Its streams get their tokens at the same pace, all at
once as those of a batch do; both sides take turns in one run.
"""

import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn, track
from rich.table import Table

from bench.bare.chain import NUM_TOKENS, REQUEST_BYTES, STEP_S, WAITED
from bench.models import sim_model
from bench.support.report import Bar, conclude, percentile
from cluster.network.rpc import channel
from cluster.process.tree import children
from protos import inference_pb2 as pb
from tandem.cli.cluster.demo import LORE, SUBJECTS
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.storyteller import STORYTELLER
from tandem.topology import plan_topology

CONCURRENT = 16
ROUNDS = 6
ROUND_S = 3.0
PROMPT_TOKENS = 100
REQUESTS = 64
MAX_ADDED = 1.5


@dataclass(slots=True)
class Sample:
    """One request as its client saw it, in seconds."""

    ttft: float
    gaps: list[float]
    finish: pb.Finish = field(default_factory=pb.Finish)


async def stream(messages: AsyncIterator[pb.GenerateResponse]) -> Sample:
    started_at = time.monotonic()
    times: list[float] = []
    finish = pb.Finish()
    async for message in messages:
        times += [time.monotonic()] * len(message.token_ids)
        finish = message.finish
    return Sample(times[0] - started_at, [later - earlier for earlier, later in pairwise(times)], finish)


# ---------------------------------------------------------------------------- the demo model


async def serve_demo(console: Console) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    settings = {"model": STORYTELLER}
    async with LocalCluster(plan_topology(1, 1, settings | {"port": 0}, settings, cores)) as cluster:
        async with Client(cluster.address) as client:
            await run_stories(client, CONCURRENT, None)  # warm up
            with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
                task = progress.add_task("demo model", total=REQUESTS)
                started_at = time.monotonic()
                samples = await run_stories(client, REQUESTS, lambda: progress.advance(task))
                elapsed = time.monotonic() - started_at
        memory = {role.name: peak_memory_mib(role.pid) for role in [cluster.router, *cluster.workers]}
        for role in cluster.workers:
            memory[f"{role.name} engine"] = max(map(peak_memory_mib, children(role.pid) or [role.pid]))
    return summarise(samples, elapsed, memory)


async def run_stories(client: Client, count: int, advance: Callable[[], None] | None) -> list[Sample]:
    """Run `count` requests, CONCURRENT at a time: half share a long prefix, half have a long one of their own."""
    gate = asyncio.Semaphore(CONCURRENT)
    seeds = random.Random(count)

    async def one(number: int) -> Sample:
        async with gate:
            lore = LORE * 3 if number % 2 else f"Chapter {seeds.getrandbits(32)}. {LORE * 3}"
            messages = [("system", lore), ("user", f"Tell me a story about {SUBJECTS[number % len(SUBJECTS)]}.")]
            sampling = pb.Sampling(max_tokens=64, temperature=0.8, seed=seeds.getrandbits(32), ignore_eos=True)
            sample = await stream(client.generate(messages=messages, sampling=sampling))
            if advance is not None:
                advance()
            return sample

    return await asyncio.gather(*(one(number) for number in range(count)))


def summarise(samples: list[Sample], elapsed: float, memory: dict[str, float]) -> dict[str, Any]:
    ttft = [sample.ttft * 1e3 for sample in samples]
    gaps = [gap * 1e3 for sample in samples for gap in sample.gaps]
    stages: dict[str, list[float]] = {}
    for sample in samples:
        for stage in sample.finish.receipt.stages:
            stages.setdefault(stage.name, []).append(stage.duration_ms)
    return {
        "ttft_ms": quantiles(ttft),
        "itl_ms": quantiles(gaps),
        "output_tokens_per_s": sum(len(sample.gaps) + 1 for sample in samples) / elapsed,
        "requests_per_s": len(samples) / elapsed,
        "peak_memory_mib": memory,
        "stages_ms": {name: quantiles(values) | {"requests": len(values)} for name, values in stages.items()},
        "moved_blocks": sum(sample.finish.receipt.kv.moved_blocks for sample in samples),
        "reused_blocks": sum(sample.finish.receipt.kv.reused_blocks for sample in samples),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    return {"p50": percentile(values, 0.5), "p95": percentile(values, 0.95), "p99": percentile(values, 0.99)}


def peak_memory_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


# ---------------------------------------------------------------------------- what the cluster adds


async def measure_added(console: Console) -> dict[str, Any]:
    """Measure the latency added by Tandem and by the bare chain, CONCURRENT streams at a time, in turns."""
    ours: list[float] = []
    bare: list[float] = []
    async with contextlib.AsyncExitStack() as stack:
        chain = await stack.enter_async_context(bare_chain())
        cluster = await stack.enter_async_context(sim_cluster(stack))
        client = await stack.enter_async_context(Client(cluster.address))
        await one_round(lambda: tandem_added(client), ROUND_S)  # warm up
        await one_round(lambda: chain_added(chain), ROUND_S)
        for _ in track(range(ROUNDS), "added latency", console=console):
            ours += await one_round(lambda: tandem_added(client), ROUND_S)
            bare += await one_round(lambda: chain_added(chain), ROUND_S)
    scaled = {"tandem_ms": [1e3 * value for value in ours], "bare_ms": [1e3 * value for value in bare]}
    return {name: quantiles(values) | {"requests": len(values)} for name, values in scaled.items()}


async def one_round(request: Callable[[], Awaitable[float]], seconds: float) -> list[float]:
    """Run CONCURRENT clients, each with one request after the other."""
    results: list[float] = []
    end = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end:
            results.append(await request())

    await asyncio.gather(*(client() for _ in range(CONCURRENT)))
    return results


async def tandem_added(client: Client) -> float:
    """Send a prompt that no worker has cached, so that every block of it is lent."""
    prompt = [random.randrange(1000) for _ in range(PROMPT_TOKENS)]
    sampling = pb.Sampling(max_tokens=NUM_TOKENS)
    sample = await stream(client.generate(token_ids=prompt, sampling=sampling))
    return sample.ttft - computed_s(sample.finish.receipt)


def computed_s(receipt: pb.Receipt) -> float:
    """Return the computing part of the TTFT: the wait for the running step and the request's own first step.

    All of its prompt was lent.
    """
    assert receipt.kv.moved_blocks == (PROMPT_TOKENS - 1) // 16
    return sum(stage.duration_ms for stage in receipt.stages if stage.name in ("decode queue", "prompt tail")) / 1e3


async def chain_added(call: Any) -> float:
    started_at = time.monotonic()
    added = 0.0
    async for message in call(b"q" * REQUEST_BYTES):
        if not added:
            (waited,) = WAITED.unpack_from(message)
            added = time.monotonic() - started_at - waited
    return added


@contextlib.asynccontextmanager
async def sim_cluster(stack: contextlib.AsyncExitStack) -> AsyncIterator[LocalCluster]:
    folder = sim_model(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "sim", context=4096)
    router = {"model": folder, "port": 0, "decode_prefill_tokens_per_s": 100.0}  # so that every prompt is lent
    cores = sorted(os.sched_getaffinity(0))
    topology = plan_topology(1, 1, router, {"model": folder, "engine": "sim"}, cores)
    paced = tuple(config.model_copy(update={"sim_step_ms": STEP_S * 1e3}) for config in topology.decode)
    topology = replace(topology, decode=paced)
    async with LocalCluster(topology) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def bare_chain() -> AsyncIterator[Any]:
    """Start the chain's processes and yield the call through them."""
    processes: list[asyncio.subprocess.Process] = []
    address = ""
    try:
        for role in ("lend", "decode", "router"):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "bench.bare.chain",
                role,
                address,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            processes.append(process)
            assert process.stdout is not None
            address = (await process.stdout.readline()).decode().strip()
        async with channel(address) as link:
            yield link.unary_stream("/chain/Generate")
    finally:
        for process in processes:
            process.kill()
            await process.wait()


# ---------------------------------------------------------------------------- the report


def show(console: Console, demo: dict[str, Any], added: dict[str, Any]) -> None:
    table = Table(title=f"demo model, {REQUESTS} requests, {CONCURRENT} at a time", title_justify="left")
    for heading in ("", "p50", "p95", "p99"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = {"TTFT ms": demo["ttft_ms"], "inter-token ms": demo["itl_ms"]}
    rows |= {f"stage: {name} ms ({values['requests']})": values for name, values in demo["stages_ms"].items()}
    rows |= {"added latency, Tandem ms": added["tandem_ms"], "added latency, bare chain ms": added["bare_ms"]}
    for name, values in rows.items():
        table.add_row(name, *(f"{values[q]:.1f}" for q in ("p50", "p95", "p99")))
    console.print(table)
    console.print(
        f"{demo['output_tokens_per_s']:.0f} output tokens/s, {demo['requests_per_s']:.1f} requests/s; "
        f"{demo['moved_blocks']} blocks moved, {demo['reused_blocks']} reused"
    )
    console.print("peak memory MiB: " + ", ".join(f"{k} {v:.0f}" for k, v in demo["peak_memory_mib"].items()))


def main() -> None:
    console = Console()
    demo = asyncio.run(serve_demo(console))
    added = asyncio.run(measure_added(console))
    show(console, demo, added)
    ratio = added["tandem_ms"]["p50"] / added["bare_ms"]["p50"]
    bars = [Bar(f"added latency p50 / bare grpc.aio chain, {CONCURRENT} concurrent", ratio, MAX_ADDED)]
    conclude("serving", bars, {"demo": demo, "added": added}, console)


if __name__ == "__main__":
    main()
