"""Cost of fingerprints, and how much of a transfer is left when the lender has computed its last chunk."""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench.engine import Tandem, prompt
from bench.vllm.compared import BLOCK
from kvtransfer.fingerprint import PlaneFingerprints
from protos import inference_pb2 as pb

PROMPT_TOKENS, CHUNK, ROUNDS = 1024, 256, 6
HEAD_DIM = 64
"""Head size of `bench.models.qwen2_half_b`."""


async def measure_transfer(model: Path, cores: Sequence[int], console: Console) -> dict[str, Any]:
    """Measure loans of prompts of four chunks."""
    settings = {"engine": "vllm", "block_tokens": BLOCK, "max_prefill_tokens": CHUNK}
    left, whole, ttfts = [], [], []
    async with Tandem(model, cores, 1, **settings) as tandem:
        for number in range(ROUNDS):
            asked_at = time.monotonic()
            sampling = pb.Sampling(max_tokens=2, temperature=0, ignore_eos=True)
            first_at = 0.0
            async for message in tandem.client.generate(
                token_ids=[*prompt(PROMPT_TOKENS, number), 1], sampling=sampling
            ):
                first_at = first_at or time.monotonic()
                if message.HasField("finish"):
                    receipt = message.finish.receipt
            stages = {stage.name: stage.duration_ms for stage in receipt.stages}
            assert receipt.kv.lender_computed_blocks == PROMPT_TOKENS // BLOCK, receipt
            if number:  # the first one compiles
                left.append(stages["transfer of the last blocks"])
                whole.append(stages["lender prefill"] + stages["transfer of the last blocks"])
                ttfts.append(1e3 * (first_at - asked_at))
    folding_ms = await asyncio.to_thread(_fingerprint_ms, model, PROMPT_TOKENS // BLOCK)
    figures = {
        "left_ms": statistics.median(left),
        "whole_ms": statistics.median(whole),
        "ttft_ms": statistics.median(ttfts),
        "fingerprints_ms": 2 * folding_ms,
        "overlap": statistics.median(left) / statistics.median(whole),
        "fingerprints": 2 * folding_ms / statistics.median(ttfts),
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
