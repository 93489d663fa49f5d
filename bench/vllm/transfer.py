"""Cost of fingerprints, and how much of a transfer is left when the lender has computed its last chunk."""

import asyncio
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench.engine import Tandem, prompt
from bench.vllm.compared import BLOCK
from kvtransfer.fingerprint import PlaneFingerprints
from protos import inference_pb2 as pb
from tandem.client import Client

PROMPT_TOKENS, CHUNK, ROUNDS = 1024, 256, 6
HEAD_DIM = 64
"""Head size of `bench.models.qwen2_half_b`."""


@dataclass(frozen=True, slots=True)
class TimedLoan:
    """Times of one request whose whole prompt was computed for a loan, in milliseconds."""

    left_ms: float
    """Time from the last chunk computed to the last block bound."""
    lender_ms: float
    """Computing of the prompt."""
    ttft_ms: float


async def timed_loans(client: Client, prompts: Iterable[Sequence[int]]) -> list[TimedLoan]:
    """Send the prompts one after the other; raise RuntimeError for one that was not computed for a loan."""
    loans = []
    for token_ids in prompts:
        asked_at, first_at = time.monotonic(), 0.0
        sampling = pb.Sampling(max_tokens=2, temperature=0, ignore_eos=True)
        async for message in client.generate(token_ids=token_ids, sampling=sampling):
            first_at = first_at or time.monotonic()
            receipt = message.finish.receipt
        if receipt.kv.lender_computed_blocks != (len(token_ids) - 1) // BLOCK:
            raise RuntimeError(f"the prompt was not computed for a loan: {receipt}")
        stages = {stage.name: stage.duration_ms for stage in receipt.stages}
        ttft_ms = 1e3 * (first_at - asked_at)
        loans.append(TimedLoan(stages["transfer of the last blocks"], stages["lender prefill"], ttft_ms))
    return loans


async def measure_transfer(model: Path, cores: Sequence[int], console: Console) -> dict[str, Any]:
    """Measure loans of prompts of four chunks."""
    settings = {"engine": "vllm", "block_tokens": BLOCK, "max_prefill_tokens": CHUNK}
    async with Tandem(model, cores, 1, **settings) as tandem:
        prompts = ([*prompt(PROMPT_TOKENS, number), 1] for number in range(ROUNDS))
        loans = (await timed_loans(tandem.client, prompts))[1:]  # the first one compiles
    folding_ms = await asyncio.to_thread(_fingerprint_ms, model, PROMPT_TOKENS // BLOCK)
    left_ms = statistics.median(loan.left_ms for loan in loans)
    whole_ms = statistics.median(loan.lender_ms + loan.left_ms for loan in loans)
    ttft_ms = statistics.median(loan.ttft_ms for loan in loans)
    figures = {
        "left_ms": left_ms,
        "whole_ms": whole_ms,
        "ttft_ms": ttft_ms,
        "fingerprints_ms": 2 * folding_ms,
        "overlap": left_ms / whole_ms,
        "fingerprints": 2 * folding_ms / ttft_ms,
    }
    console.print("transfer:", figures)
    return figures


def _fingerprint_ms(model: Path, num_blocks: int) -> float:
    """Return the time to fingerprint a prompt's blocks once; lender and borrower do it once each."""
    shape = json.loads((model / "config.json").read_text())
    layers, heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
    span = heads * BLOCK * 2 * HEAD_DIM * (4 if shape["dtype"] == "float32" else 2)
    pool = np.random.Generator(np.random.PCG64(0)).integers(0, 256, layers * num_blocks * span, np.uint8)
    fingerprints = PlaneFingerprints(pool, num_blocks, layers, heads)
    blocks, times = list(range(num_blocks)), []
    for _ in range(20):
        started_at = time.perf_counter()
        fingerprints.of(blocks)
        times.append(1e3 * (time.perf_counter() - started_at))
    return statistics.median(times)
