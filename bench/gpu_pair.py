"""Two workers on one GPU: 1 prefill + 1 decode beside 2 aggregated, with the same requests.

Part of `make bench-gpu`. The two share the GPU, so the figures are about the KV path and about steps that no prompt
interrupts, not about what a second GPU would add.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from bench.models import LLAMA_8B, SMALL_LLAMA, llama
from bench.serving import Sample, stream
from bench.support.report import Bar
from protos import inference_pb2 as pb
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.topology import Topology, plan_topology

LAYERS = 16
"""Half of Llama 3 8 B's, so that two workers load soon."""
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, RATE = 40, 4096, 128, 4.0
WARM_UPS = 4
SEED = 1
MEMORY = Path("/dev/shm")
APART = "1 + 1"
POOLS = {APART: (1, 1), "2 aggregated": (0, 2)}
"""Prefill and decode workers of each cluster."""


def torch_plan(model: Path, num_prefill: int, num_decode: int, device: str) -> Topology:
    """Return a cluster of the torch engine."""
    worker = {"model": model, "device": device, "dtype": "bfloat16"}
    worker["kv_memory_mib"] = 12_288 if device == "cuda" else 512
    cores = sorted(os.sched_getaffinity(0))
    return plan_topology(num_prefill, num_decode, {"model": model, "port": 0}, worker, cores)


async def serve(client: Client, requests: int, prompt_tokens: int) -> dict[str, Any]:
    """Send the requests at random times, and return what came of them."""
    draw = random.Random(SEED)
    vocabulary = range(5, 4000)

    async def ask(num_tokens: int) -> Sample:
        sampling = pb.Sampling(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
        prompt = draw.choices(vocabulary, k=num_tokens)
        return await stream(client.generate(token_ids=prompt, sampling=sampling, timeout_s=120))

    await asyncio.gather(*(ask(prompt_tokens // 4) for _ in range(WARM_UPS)))
    asked = []
    for _ in range(requests):
        asked.append(asyncio.create_task(ask(prompt_tokens)))
        await asyncio.sleep(draw.expovariate(RATE))
    told = await asyncio.gather(*asked, return_exceptions=True)
    samples = [each for each in told if isinstance(each, Sample)]
    receipts = [sample.finish.receipt.kv for sample in samples]
    return {
        "lost": [str(each) for each in told if isinstance(each, BaseException)],
        "ttft_ms": 1e3 * statistics.mean(sample.ttft for sample in samples),
        "itl_ms": 1e3 * statistics.mean(statistics.mean(sample.gaps) for sample in samples),
        "itl_max_ms": 1e3 * max(max(sample.gaps) for sample in samples),
        "verified_blocks": sum(kv.verified_blocks for kv in receipts),
        "mismatched_blocks": sum(kv.mismatched_blocks for kv in receipts),
        "failed_loans": sum(bool(kv.loan_failure) for kv in receipts),
        "failures": sorted({kv.loan_failure for kv in receipts if kv.loan_failure}),
        "lanes": Counter(lane for kv in receipts for lane in kv.ucx_transports),
    }


async def serve_torch(model: Path, pools: tuple[int, int], device: str, size: tuple[int, int]) -> dict[str, Any]:
    """Start a cluster of (prefill, decode) workers and serve `size`: (requests, prompt tokens)."""
    async with LocalCluster(torch_plan(model, *pools, device)) as cluster, Client(cluster.address) as client:
        return await serve(client, *size)


def measure(device: str = "cuda") -> tuple[list[Bar], dict[str, Any]]:
    """Serve with both clusters; return bars and figures."""
    on_gpu = device == "cuda"
    size, shape = ((REQUESTS, PROMPT_TOKENS), LLAMA_8B | {"num_hidden_layers": LAYERS})
    if not on_gpu:
        size, shape = (6, 512), SMALL_LLAMA
    with tempfile.TemporaryDirectory(dir=MEMORY if on_gpu else None) as folder:
        model = llama(Path(folder, "model"), shape, "bfloat16", device)
        figures = {name: asyncio.run(serve_torch(model, pools, device, size)) for name, pools in POOLS.items()}
    return bars_of("two workers on this GPU", figures, "cuda_ipc" if on_gpu else "memory"), figures


def bars_of(what: str, figures: dict[str, dict[str, Any]], lane: str) -> list[Bar]:
    """Return the bars of both clusters; loans must go over `lane`."""
    apart = figures[APART]
    lost = sum(len(each["lost"]) for each in figures.values())
    over = sum(count for name, count in apart["lanes"].items() if lane in name) / max(1, sum(apart["lanes"].values()))
    wrong = apart["mismatched_blocks"] + apart["failed_loans"]
    return [
        Bar(f"{what}: requests lost", lost, 0),
        Bar(f"{what}: moved blocks that differed, or loans that failed", wrong, 0),
        Bar(f"{what}: share of loans over {lane}", over, 1, at_least=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_pair", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    bars, figures = measure(parser.parse_args().device)
    print(json.dumps(figures, indent=1))
    for bar in bars:
        print(f"{bar.what}: {bar.measured:g}, {'met' if bar.met else 'short'}")


if __name__ == "__main__":
    main()
