"""Two workers on one GPU: 1 prefill + 1 decode beside 2 aggregated, with the same requests.

Part of `bench/gpu_vllm.py`. The two share the GPU, so the figures are about the KV path and about steps that no prompt
interrupts, not about what a second GPU would add.
"""

import asyncio
import random
import statistics
from collections import Counter
from typing import Any

from bench.serving import Sample, stream
from bench.support.report import Bar
from protos import inference_pb2 as pb
from tandem.client import Client

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, RATE = 40, 4096, 128, 4.0
WARM_UPS = 4
SEED = 1
APART = "1 + 1"
POOLS = {APART: (1, 1), "2 aggregated": (0, 2)}
"""Prefill and decode workers of each cluster."""


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
