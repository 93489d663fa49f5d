"""One aggregated worker beside plain vLLM on CPUs, Model Runner V1: the engine on one half of the cores.

All else has the other half: vLLM's front with the client in its process; Tandem's router, front and client. On two
cores that is a core each. The loop of Tandem's engine is on the engine's cores, as vLLM's EngineCore is.
"""

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.models import LLAMA_170M, cpu_dtype, llama
from bench.support.report import OUT, Bar
from bench.vllm.compared import VLLM
from bench.vllm.sides import Setting
from bench.vllm.turns import Limits, Loads, bars_of, compare
from tandem.storyteller import STORYTELLER

LIMITS = Limits(tokens_per_s=0.97, itl_p50_ms=1.03, ttft_p50_ms=1.05)
ROUNDS = int(os.environ.get("TANDEM_VLLM_ROUNDS", "3"))
LOADS = Loads((1, 8, 32), prompt_tokens=128, output_tokens=64, long_prompt_tokens=1024, samplings=("greedy", "top-p"))
OPTIONS = {"max_model_len": 2048, "max_num_seqs": 64}
KV_MIB, STEP_TOKENS = 1024, 2048


async def compare_ranks(cores: Sequence[int], console: Console) -> dict[str, Any]:
    """Compare with two tensor-parallel ranks, each of which has one half of the cores; all else shares them."""
    dtype = cpu_dtype()
    large = await asyncio.to_thread(llama, (OUT / f"llama-170m-{dtype}").absolute(), LLAMA_170M, dtype)
    python = (VLLM / "bin" / "python").absolute()
    setting = Setting(
        large, LLAMA_170M["vocab_size"], dtype, KV_MIB, STEP_TOKENS, OPTIONS, python, cores, cores, ranks=2
    )
    figures: dict[str, Any] = {"cores": cores}
    with tempfile.TemporaryDirectory() as scratch:
        await compare(setting, LOADS, ROUNDS, True, Path(scratch), console, figures)
    return {"170 M, 2 ranks": figures}


async def compare_aggregated(cores: Sequence[int], console: Console) -> dict[str, Any]:
    """Compare on the demo model and on a larger one."""
    dtype = cpu_dtype()
    large = await asyncio.to_thread(llama, (OUT / f"llama-170m-{dtype}").absolute(), LLAMA_170M, dtype)
    half = len(cores) // 2
    figures: dict[str, Any] = {}
    for name, model, vocabulary in (("storyteller", STORYTELLER, 2048), ("170 M", large, LLAMA_170M["vocab_size"])):
        python = (VLLM / "bin" / "python").absolute()
        own, others = cores[:half], cores[half:]
        setting = Setting(model, vocabulary, dtype, KV_MIB, STEP_TOKENS, OPTIONS, python, own, others)
        kept = figures[name] = {"engine's cores": own, "other cores": others}
        os.sched_setaffinity(0, others)  # for all processes that are started here
        try:
            with tempfile.TemporaryDirectory() as scratch:
                await compare(setting, LOADS, ROUNDS, True, Path(scratch), console, kept)
        finally:
            os.sched_setaffinity(0, cores)
    return figures


def aggregated_bars(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars of both models."""
    return [bar for name, kept in figures.items() for bar in bars_of(name, kept["loads"], LIMITS)]
