"""`make bench-warm`: TTFT of the first request of a fresh worker beside that of its tenth.

The demo model behind a router, with one prefill and one decode worker whose KV moves over TCP. Each round starts all
of it afresh, then starts the prefill worker again beside the running decode worker, then replaces the decode worker by
one that joins later. After each start ten prompts of one length go through, one after the other, and no two begin
alike. The ratio is the median of the rounds' first TTFT over the median of their tenth.
"""

import asyncio
import os
import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from bench.report import Bar, Parts, conclude
from bench.serving import Sample, stream
from bench.vllm.compared import VLLM
from protos import inference_pb2 as pb
from tandem.cli.demo import STORYTELLER
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster, RoleProcess, stop_process
from tandem.topology import plan_topology

ROUNDS = int(os.environ.get("R", "5"))
REQUESTS = 10
PROMPT_TOKENS = 256
MAX_RATIO = 1.5
STARTS = ("fresh cluster", "prefill worker started again", "decode worker that joins later")
ENGINES: dict[str, dict[str, Any]] = {
    "torch": {"engine": "torch"},
    "vllm": {"engine": "vllm", "vllm_python": VLLM / "bin" / "python", "kv_memory_mib": 64},
}
READY_S = 60.0


async def measure(engine: str, console: Console) -> dict[str, Any]:
    """Return milliseconds to the first token and of the receipts' stages, by start, then by number of the request."""
    rounds = [await _round(ENGINES[engine], number) for number in range(ROUNDS)]
    figures: dict[str, Any] = {}
    for start in STARTS:
        by_request = [[each[start][number] for each in rounds] for number in range(REQUESTS)]
        ttft = [statistics.median(sample.ttft * 1e3 for sample in samples) for samples in by_request]
        stages = {"first": _stages(by_request[0]), "tenth": _stages(by_request[-1])}
        figures[start] = {"ttft_ms": ttft, "ratio": ttft[0] / ttft[-1], "stages_ms": stages}
        shown = ", ".join(f"{value:.1f}" for value in ttft)
        console.print(f"{engine}, {start}: TTFT in ms {shown}", markup=False)
        console.print(f"  stages of the first, in ms: {stages['first']}", markup=False)
        console.print(f"  stages of the tenth, in ms: {stages['tenth']}", markup=False)
    return figures


async def _round(settings: dict[str, Any], number: int) -> dict[str, list[Sample]]:
    cores = sorted(os.sched_getaffinity(0))
    worker = {"model": STORYTELLER, "strict_lanes": ("tcp",)} | settings
    found: dict[str, list[Sample]] = {}
    plan = plan_topology(1, 1, {"model": STORYTELLER, "port": 0}, worker, cores)
    async with LocalCluster(plan) as cluster, Client(cluster.address) as client:
        await client.cluster_status()  # the client's own connection
        found[STARTS[0]] = await _ask(client, f"{number} fresh")
        prefill, decode = cluster.prefill.pop(), cluster.decode.pop()
        await stop_process(prefill.process)
        await cluster.add_worker("prefill_worker", plan.prefill[0])
        await client.wait_for_workers(1, 1, READY_S)
        found[STARTS[1]] = await _ask(client, f"{number} again")
        later = plan.decode[0].model_copy(update={"worker_id": "decode-later"})
        await cluster.add_worker("decode_worker", later)
        await client.wait_for_workers(1, 2, READY_S)
        await _leaves(decode, client)
        found[STARTS[2]] = await _ask(client, f"{number} later")
    return found


async def _leaves(worker: RoleProcess, client: Client) -> None:
    """Stop a worker, and wait until the router places nothing on it."""
    await stop_process(worker.process)
    while worker.name in {each.worker_id for each in (await client.cluster_status()).models[0].workers}:
        await asyncio.sleep(0.02)


async def _ask(client: Client, seed: str) -> list[Sample]:
    """Send prompts that no cache holds, one after the other."""
    seeds = random.Random(seed)
    samples = []
    for _ in range(REQUESTS):
        prompt = seeds.choices(range(3, 2048), k=PROMPT_TOKENS)
        sampling = pb.Sampling(max_tokens=2, temperature=0.8, seed=1, ignore_eos=True)
        samples.append(await stream(client.generate(token_ids=prompt, sampling=sampling)))
        assert samples[-1].finish.receipt.kv.moved_blocks, "the request borrowed nothing"
        await asyncio.sleep(0.2)
    return samples


def _stages(samples: Sequence[Sample]) -> dict[str, float]:
    names = [stage.name for stage in samples[0].finish.receipt.stages]
    of_all = [{stage.name: stage.duration_ms for stage in sample.finish.receipt.stages} for sample in samples]
    return {name: round(statistics.median(each.get(name, 0.0) for each in of_all), 2) for name in names}


async def main(engines: Sequence[str]) -> None:
    console = Console()
    parts = Parts(console)
    for engine in engines:
        await parts.measure(engine, measure(engine, console))
    bars = [
        Bar(f"{engine}, {start}: TTFT of the first request / tenth", of_start["ratio"], MAX_RATIO)
        for engine, figures in parts.figures.items()
        for start, of_start in figures.items()
    ]
    conclude("warm", bars, parts.figures, console, parts.failed)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or tuple(ENGINES)))
