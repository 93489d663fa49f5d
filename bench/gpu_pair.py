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

from bench.models import LLAMA_8B, llama, small_llama
from bench.report import Bar
from bench.serving import Sample, stream
from protos import inference_pb2 as pb
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

LAYERS = 16
"""Half of Llama 3 8 B's, so that two workers load soon."""
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, RATE = 40, 4096, 128, 4.0
WARM_UPS = 4
SEED = 1
MEMORY = Path("/dev/shm")


def worker_settings(model: Path, device: str) -> dict[str, object]:
    return {"model": model, "device": device, "dtype": "bfloat16", "kv_memory_mib": 12_288 if device == "cuda" else 512}


async def serve(
    model: Path, num_prefill: int, num_decode: int, device: str, requests: int, prompt_tokens: int
) -> dict[str, Any]:
    """Start a cluster, send the requests at random times, and return what came of them."""
    draw = random.Random(SEED)
    vocabulary = range(5, 4000)
    plan = plan_topology(
        num_prefill,
        num_decode,
        {"model": model, "port": 0},
        worker_settings(model, device),
        sorted(os.sched_getaffinity(0)),
    )
    async with LocalCluster(plan) as cluster, Client(cluster.address) as client:

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
        "lanes": Counter(lane for kv in receipts for lane in kv.ucx_transports),
    }


def measure(device: str = "cuda") -> tuple[list[Bar], dict[str, Any]]:
    """Serve with both clusters; return bars and figures."""
    on_gpu = device == "cuda"
    requests, prompt_tokens = (REQUESTS, PROMPT_TOKENS) if on_gpu else (6, 512)
    with tempfile.TemporaryDirectory(dir=MEMORY if on_gpu else None) as folder:
        path = Path(folder, "model")
        model = llama(path, LLAMA_8B | {"num_hidden_layers": LAYERS}) if on_gpu else small_llama(path, "bfloat16")
        figures = {
            name: asyncio.run(serve(model, *workers, device, requests, prompt_tokens))
            for name, workers in (("1 + 1", (1, 1)), ("2 aggregated", (0, 2)))
        }
    apart = figures["1 + 1"]
    lost = sum(len(each["lost"]) for each in figures.values())
    lane = "cuda_ipc" if on_gpu else "memory"
    over = sum(count for name, count in apart["lanes"].items() if lane in name) / max(1, sum(apart["lanes"].values()))
    bars = [
        Bar("two workers on this GPU: requests lost", lost, 0),
        Bar(
            "the same: moved blocks that differed, or loans that failed",
            apart["mismatched_blocks"] + apart["failed_loans"],
            0,
        ),
        Bar(f"the same: share of loans over {lane}", over, 1, at_least=True),
    ]
    return bars, figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_pair", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    bars, figures = measure(parser.parse_args().device)
    print(json.dumps(figures, indent=1))
    for bar in bars:
        print(f"{bar.what}: {bar.measured:g}, {'met' if bar.met else 'short'}")


if __name__ == "__main__":
    main()
