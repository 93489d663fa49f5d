"""The local store below vLLM's pool: time to the first token of restored prompts, and hits of a trace of conversations.

The trace is Mooncake's `conversation_trace.jsonl`, which is not in the repository: TANDEM_TRACE names it. Each of its
blocks of 512 tokens is one block of 32 tokens here, so that a CPU can compute its prompts.
"""

import json
import os
import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.models import SMALL_LLAMA, cpu_dtype, llama, qwen2_half_b
from bench.support.report import OUT
from bench.support.workers import Workers
from bench.vllm.compared import BLOCK, VLLM

PROMPT_TOKENS, PROMPTS = 4096, 3
TRACE_REQUESTS = 600
TRACE_POOL_BLOCKS = 500
"""Blocks of the pool, as many for a request of the trace as in a pool of 256,000 tokens."""
MAX_BLOCKS = 60
"""Blocks of the longest prompt, which the model's context bounds."""
HOST_MIB = 4096


async def measure_restores(cores: Sequence[int], console: Console) -> dict[str, Any]:
    """Measure prompts of the shape of Qwen2 0.5 B: computed, evicted by the next ones, and restored."""
    model = qwen2_half_b(OUT / f"qwen2-0.5b-{cpu_dtype()}", dtype=cpu_dtype())
    block_mib = 24 * 2 * 64 * 2 * BLOCK * (2 if cpu_dtype() == "bfloat16" else 4) / (1 << 20)
    pool = int((PROMPT_TOKENS // BLOCK + 20) * block_mib) + 1
    settings = _settings(model, cores, pool, PROMPT_TOKENS + 64) | {"kv_host_memory_mib": HOST_MIB}
    prompts = [random.Random(number).choices(range(3, 150_000), k=PROMPT_TOKENS + 1) for number in range(PROMPTS)]
    async with Workers(decode_a=settings) as workers:
        await workers.decode("decode_a", prompts[0][: BLOCK + 1], None)
        computed = [await workers.decode("decode_a", prompt, None) for prompt in prompts]
        restored = [await workers.decode("decode_a", prompt, None) for prompt in prompts]
    for receipt, _ in restored:
        if receipt.kv.restored_blocks < PROMPT_TOKENS // BLOCK * 0.9:
            raise RuntimeError(f"the prompt was not restored: {receipt.kv}")
    figures = {
        "computed_s": statistics.median(seconds for _, seconds in computed),
        "restored_s": statistics.median(seconds for _, seconds in restored),
    }
    console.print("restores:", figures)
    return figures


async def measure_hits(cores: Sequence[int], console: Console) -> dict[str, Any]:
    """Measure hits of the trace with main memory below the pool, and without."""
    if not (trace := os.environ.get("TANDEM_TRACE")):
        raise RuntimeError("TANDEM_TRACE names no trace file")
    prompts = _prompts(trace)
    model = llama(OUT / f"small-llama-{cpu_dtype()}", SMALL_LLAMA, cpu_dtype())
    shares = {}
    for side, host_mib in (("without", 0), ("with", HOST_MIB)):
        block_mib = 8 * 4 * 64 * 2 * BLOCK * (2 if cpu_dtype() == "bfloat16" else 4) / (1 << 20)
        settings = _settings(model, cores, int(TRACE_POOL_BLOCKS * block_mib), 2048)
        async with Workers(decode_a=settings | {"kv_host_memory_mib": host_mib}) as workers:
            found = wanted = 0
            for prompt in prompts:
                receipt, _ = await workers.decode("decode_a", prompt, None)
                found += receipt.kv.reused_blocks + receipt.kv.restored_blocks
                wanted += (len(prompt) - 1) // BLOCK
        shares[side] = found / wanted
    console.print("hits:", shares)
    return shares


def _prompts(trace: str) -> list[list[int]]:
    return [_prompt(json.loads(line)["hash_ids"]) for line in Path(trace).read_text().splitlines()[:TRACE_REQUESTS]]


def _prompt(hash_ids: Iterable[int]) -> list[int]:
    """Return one block of tokens for each block of the trace, and one token more."""
    blocks = list(hash_ids)[:MAX_BLOCKS]
    tokens = [token for block in blocks for token in random.Random(block).choices(range(3, 4000), k=BLOCK)]
    return [*tokens, 2]


def _settings(model: Path, cores: Sequence[int], pool_mib: int, max_len: int) -> dict[str, Any]:
    return {
        "model": model,
        "engine": "vllm",
        "vllm_python": VLLM / "bin" / "python",
        "block_tokens": BLOCK,
        "kv_memory_mib": pool_mib,
        "cores": tuple(cores),
        "dtype": cpu_dtype(),
        "max_prefill_tokens": 2048,
        "vllm_options": {"max_model_len": max_len, "max_num_seqs": 4},
    }
