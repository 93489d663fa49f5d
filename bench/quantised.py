"""`make bench-quantised`: gains and costs of quantised weights and quantised KV.

Speed: a model of Qwen2 0.5 B's shape, served by clusters that differ in `weights` only, in turns, one idle while the
other is measured. Quality: the demo model on held-out stories of its own kind (seeds that it was not trained on), all
places of a text in one forward, as a prompt is computed. Capacity: requests that a pool of fixed size admits at once.
Bytes: the bytes moved, by receipts of a prefill and a decode worker.
"""

import asyncio
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bench.engine import Tandem, alone, batch, long_prompt, request
from bench.models import qwen2_half_b
from bench.report import OUT, Bar, conclude
from engine.backends.torch.backends import Backend
from engine.backends.torch.runner import TorchRunner
from engine.core.engine_core import EngineCore
from engine.core.loan_host import EngineLimits
from engine.core_types import Chunk, SamplingParams, Sequence, StepBudget
from engine.messages.from_engine import Rejected
from engine.messages.to_engine import Generate as Ask
from engine.model.quantization import AS_SAVED, QuantizationConfig
from kvtransfer.local import LocalNetwork, LocalTransport
from protos import inference_pb2 as pb
from tandem.storyteller import STORYTELLER

ROUNDS = 3
HELD_OUT_SEED = 1_000_007
"""Seed of the held-out stories, as in the storyteller's train.py."""
TEXTS = {512: 24, 1024: 12}
"""Number of rows, by their length in tokens."""
POOL_MIB = 64
KV_MIB = 256
"""Pool size of each worker."""
VARIANTS = {
    "bf16": AS_SAVED,
    "int8 weights": QuantizationConfig(weights="int8"),
    "int4 weights": QuantizationConfig(weights="int4"),
    "int8 KV": QuantizationConfig(kv_dtype="int8"),
    "fp8 KV": QuantizationConfig(kv_dtype="fp8"),
    "int8 weights, int8 KV": QuantizationConfig(weights="int8", kv_dtype="int8"),
}
KINDS = ("auto", "int8", "int4")
TTFT_BARS = {"int8": 1.1, "int4": 1.25}


# -------------------------------------------------------------------------------------------------------------- speed


async def speed(console: Console) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Return medians, by workload and kind of weights, and the engines' peak memory in MiB."""
    model, cores = qwen2_half_b(OUT / "qwen2-0.5b"), sorted(os.sched_getaffinity(0))
    workloads: dict[str, tuple[int, Any]] = {
        "batch 1, ms per token": (ROUNDS, alone),
        "1024-token prompt, TTFT in ms": (ROUNDS, long_prompt),
        "32 x (64 in, 32 out), tokens/s": (ROUNDS, lambda generate, seed: batch(generate, 64, 32, seed)),
    }
    figures: dict[str, dict[str, Any]] = {}
    async with AsyncExitStack() as stack:
        clusters = {kind: Tandem(model, cores, 0, kv_memory_mib=KV_MIB, weights=kind) for kind in KINDS}
        for tandem in clusters.values():
            await stack.enter_async_context(tandem)
        sides = {kind: tandem.generate for kind, tandem in clusters.items()}
        for generate in sides.values():
            await request(generate, 64, 8, 1)
        for name, (rounds, workload) in workloads.items():
            taken: dict[str, list[float]] = {kind: [] for kind in sides}
            for number in range(rounds):
                for kind, generate in sides.items():
                    taken[kind].append(await workload(generate, 1000 * number))
            figures[name] = {kind: statistics.median(values) for kind, values in taken.items()} | {"all": taken}
            console.print(f"{name}: " + ", ".join(f"{kind} {figures[name][kind]:.1f}" for kind in sides))
        peaks = {kind: tandem.engine_peak_mib() for kind, tandem in clusters.items()}
    console.print(f"engine's peak memory, MiB: {peaks}")
    return figures, peaks


# ------------------------------------------------------------------------------------------------------------ quality


def held_out() -> list[list[int]]:
    """Return rows of token ids as in the demo model's training, of another seed."""
    sys.path.insert(0, str(STORYTELLER.parent))
    from grammar import long_documents, short_documents  # type: ignore[import-not-found]
    from tokens import rows  # type: ignore[import-not-found]
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(STORYTELLER)
    of: dict[int, Iterator[list[int]]] = {
        512: rows(tokenizer, short_documents(HELD_OUT_SEED), short_documents(HELD_OUT_SEED + 1), 512),
        1024: rows(tokenizer, long_documents(HELD_OUT_SEED), short_documents(HELD_OUT_SEED + 1), 1024),
    }
    return [row for length, count in TEXTS.items() for row in islice(of[length], count)]


def logits_of(runner: TorchRunner, text: list[int]) -> Tensor:
    """Return the logits before each token but the first, [len(text) - 1, vocab]."""
    blocks = list(range(runner.layout.blocks_for(len(text))))
    sequence = Sequence("text", text[:1], 1, b"", SamplingParams(1), 0, 0, blocks=blocks)
    return runner.logits([Chunk(sequence, 0, 1, draft_tokens=tuple(text[1:-1]))]).float()


def quality(console: Console) -> dict[str, dict[str, float]]:
    """Return each variant's perplexity, and how often its likeliest token is that of the saved weights."""
    texts, figures = held_out(), dict[str, dict[str, float]]()
    expected: list[Tensor] = []
    for name, quantization in VARIANTS.items():
        backend: Backend = "sdpa" if quantization.kv_dtype == "fp8" else "auto"  # there are no CPU kernels for fp8
        runner = TorchRunner(STORYTELLER, "auto", 16, POOL_MIB << 20, backend, quantization=quantization)
        loss, likeliest = 0.0, list[Tensor]()
        for text in texts:
            logits = logits_of(runner, text)
            loss += float(torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="sum"))
            likeliest.append(logits.argmax(-1))
        expected = expected or likeliest
        same = torch.cat([one == other for one, other in zip(likeliest, expected, strict=True)])
        figures[name] = {
            "perplexity": float(torch.tensor(loss / same.numel()).exp()),
            "agreement": float(same.double().mean()),
        }
        console.print(
            f"{name}: perplexity {figures[name]['perplexity']:.4f}, agreement {figures[name]['agreement']:.4f}"
        )
    return figures


# --------------------------------------------------------------------------------------------------- room, and bytes


def admitted(quantization: QuantizationConfig) -> int:
    """Return how many requests of 200 tokens in and 100 out a pool of POOL_MIB admits before it refuses one."""
    runner = TorchRunner(STORYTELLER, "auto", 16, POOL_MIB << 20, quantization=quantization)
    said: list[Any] = []
    limits = EngineLimits(StepBudget(2048, 512))
    core = EngineCore(runner, LocalTransport(LocalNetwork(), "one"), limits, said.append)
    core.start()
    count = 0
    while not any(isinstance(message, Rejected) for message in said):
        prompt = tuple(torch.randint(3, 2000, (200,), generator=torch.Generator().manual_seed(count)).tolist())
        core.handle(Ask(str(count), prompt, (), SamplingParams(100, ignore_eos=True), "", 0, borrow=False))
        count += 1
    return count - 1


async def bytes_per_block(kv_dtype: str) -> float:
    """Return the bytes per block of a prompt that a prefill worker computed and a decode worker read."""
    cores = sorted(os.sched_getaffinity(0))
    async with Tandem(STORYTELLER, cores, 1, kv_memory_mib=KV_MIB, kv_dtype=kv_dtype) as tandem:
        token_ids = torch.randint(3, 2000, (1000,), generator=torch.Generator().manual_seed(1)).tolist()
        sampling = pb.Sampling(max_tokens=8, ignore_eos=True)
        messages = [message async for message in tandem.client.generate(token_ids=token_ids, sampling=sampling)]
    kv = messages[-1].finish.receipt.kv
    assert kv.moved_blocks > 50, "little was lent"
    return float(kv.moved_bytes / kv.moved_blocks)


async def main() -> None:
    console = Console()
    parts = sys.argv[1:] or ["quality", "room", "bytes", "speed"]
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    if "quality" in parts:
        figures["quality"] = found = quality(console)
        for name in list(VARIANTS)[1:]:
            loss = found[name]["perplexity"] / found["bf16"]["perplexity"]
            bars.append(Bar(f"{name}: perplexity of the demo model, / bf16", loss, 1.03 if "int4" in name else 1.01))
    if "room" in parts:
        figures["admitted"] = room = {name: admitted(VARIANTS[name]) for name in ("bf16", "int8 KV")}
        console.print(f"requests in {POOL_MIB} MiB: {room}")
        bars.append(Bar("requests that fit into a pool, int8 KV / bf16", room["int8 KV"] / room["bf16"], 1.8, True))
    if "bytes" in parts:
        figures["bytes_per_block"] = moved = {kind: await bytes_per_block(kind) for kind in ("auto", "int8")}
        console.print(f"bytes moved per block: {moved}")
        bars.append(Bar("bytes moved per block, int8 KV / bf16", moved["int8"] / moved["auto"], 0.55))
    if "speed" in parts:
        fast, figures["engine_peak_mib"] = await speed(console)
        figures["speed"] = fast
        for kind in KINDS[1:]:
            one, prompt, many = (of[kind] / of["auto"] for of in fast.values())
            bars.append(Bar(f"batch 1: ms per token, {kind} weights / bf16", one, 0.65))
            bars.append(Bar(f"1024-token prompt: TTFT, {kind} weights / bf16", prompt, TTFT_BARS[kind]))
            if kind == "int8":  # int4's groups make many rows slower, by design: that is printed, and has no bar
                bars.append(Bar("32 at once: output tokens/s, int8 weights / bf16", many, 0.95, at_least=True))
    conclude("quantised", bars, figures, console)


if __name__ == "__main__":
    asyncio.run(main())
