"""KV kept in a byte a number: kernels against the reference, and what is said whoever computed it, where and how."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.torch.backends import Backend
from engine.backends.torch.device import allocate
from engine.backends.torch.kv.rows import LARGEST, QuantisedRows, quantise_vectors
from engine.backends.torch.native.attention import NativePagedAttention
from engine.backends.torch.native.kernels import Kernels
from engine.backends.torch.runner import TorchRunner
from engine.backends.torch.sdpa import SdpaPagedAttention
from engine.core_types import Chunk, SamplingParams, Sequence, StepBudget
from engine.errors import EngineStartError
from engine.kv.layout import KvDtype, KvLayout
from engine.model.quantization import AS_SAVED, QuantizationConfig
from support.drafting import Recording, always
from support.long_runs import long
from support.torch_engine import TorchEngine, all_ids, ids, request, requests
from support.torch_models import VOCAB, logits_after, random_prompts, runner_of
from tandem.client import Client

KV = QuantizationConfig(kv_dtype="int8")
BOTH = QuantizationConfig(weights="int8", kv_dtype="int8")
FP8 = QuantizationConfig(kv_dtype="fp8")
CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------------------------------------------ one vector at a time


@given(st.integers(0, 1000), st.floats(1e-6, 1e6), st.sampled_from(TYPES), st.sampled_from(["int8", "fp8"]))
def test_a_vector_is_its_nearest_multiples_of_a_scale_of_its_own(
    seed: int, size: float, dtype: torch.dtype, kept: KvDtype
) -> None:
    vectors = (randn(4, 24, seed=seed) * size).to(dtype)
    vectors[2] = 0
    values, scales = quantise_vectors(vectors, kept)
    largest = values.float().abs().amax(-1)
    made = values.float() * scales.float()[:, None]
    step = scales.float()[:, None]
    if kept == "fp8":  # 3 bits of mantissa, and 2**-9 where that is less than the least normal number
        step = torch.maximum(vectors.float().abs() / 8, step / 512)
    assert (made - vectors.float()).abs().le(step * 0.5001).all()
    assert largest.max() <= LARGEST[kept]
    assert largest[0] >= {"int8": 126, "fp8": 416}[kept], "a scale is rounded up by less than 1 %"
    assert made[2].eq(0).all()
    alone, _ = quantise_vectors(vectors[1:2], kept)
    assert torch.equal(alone.view(torch.uint8), values[1:2].view(torch.uint8)), "whatever the others are"


SHAPES = [
    (4, 2, 16, 64, 300, 20.0),
    (14, 2, 64, 16, None, 0.0),
    (6, 1, 128, 7, None, 0.0),
    (4, 4, 80, 16, 24, 0.0),
    (2, 1, 6, 7, 24, 20.0),
]
"""Heads, KV heads, head_dim, block_tokens, window, softcap."""
CHUNKS = [(0, 5), (3, 1), (17, 40), (600, 1), (250, 70), (256, 3), (0, 300)]


def spread(layout: KvLayout) -> tuple[list[Chunk], int]:
    """CHUNKS, their blocks dealt out at random; and how many blocks."""
    counts = [layout.blocks_for(start + count) for start, count in CHUNKS]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).tolist()
    chunks = []
    for start, count in CHUNKS:
        tokens = [0] * (start + count)
        sequence = Sequence("a", tokens, len(tokens), b"", SamplingParams(1), 0, 0)
        sequence.blocks = [order.pop() for _ in range(layout.blocks_for(len(tokens)))]
        chunks.append(Chunk(sequence, start, count))
    return chunks, sum(counts)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_tokens", "window", "softcap"), SHAPES)
def test_attention_equals_the_reference(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_tokens: int, window: int | None, softcap: float
) -> None:
    layout = KvLayout(2, kv_heads, head_dim, block_tokens, str(dtype).removeprefix("torch."), "int8")
    chunks, num_blocks = spread(layout)
    total = sum(count for _, count in CHUNKS)
    query = randn(1, heads, total, head_dim, dtype=dtype)
    key, value = (randn(1, kv_heads, total, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    pools, results = [], []
    for native in (False, True):
        memory = allocate(layout, num_blocks, CPU)
        slots = torch.arange(memory.tensor.numel() // layout.vector_bytes)
        QuantisedRows(memory.tensor, layout).write(slots, randn(len(slots), head_dim, dtype=dtype, seed=4))
        pool = memory.tensor
        attention = NativePagedAttention(Kernels(), pool, layout, heads) if native else SdpaPagedAttention(pool, layout)
        attention.prepare(chunks)
        results.append(attention.attend(1, query, key, value, head_dim**-0.5, window, softcap).float())
        pools.append(pool)
    assert torch.equal(*pools), "the same bytes were written"
    assert (results[0] - results[1]).abs().max() <= (2e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("native", [False, True])
def test_unread_memory_does_not_matter(native: bool) -> None:
    """What lies in a block after the sequence's end may be anything, NaN too, and so may a block that is another's."""
    layout = KvLayout(1, 1, 64, 16, "float32", "int8")
    short, long = (
        Sequence("a", [0] * length, length, b"", SamplingParams(1), 0, 0, blocks=blocks)
        for length, blocks in ((6, [1]), (18, [2, 3]))
    )
    results = []
    for filling in (0, 0xFF):
        pool = torch.full((4, 1, 1, 2, 16 * 66), filling, dtype=torch.uint8)
        attention = NativePagedAttention(Kernels(), pool, layout, 1) if native else SdpaPagedAttention(pool, layout)
        for chunks in ([Chunk(short, 0, 5), Chunk(long, 0, 17)], [Chunk(short, 5, 1), Chunk(long, 17, 1)]):
            count = sum(chunk.count for chunk in chunks)
            attention.prepare(chunks)
            query, key, value = (randn(1, 1, count, 64, seed=seed) for seed in range(3))
            results.append(attention.attend(0, query, key, value, 0.125, None, 0.0))
    assert all(result.isfinite().all() for result in results)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


# -------------------------------------------------------------------------------------------------------- whole models


@pytest.fixture(scope="module")
def saved(make_model: Callable[..., Path]) -> Path:
    return make_model("qwen2", dtype="bfloat16")


(PROMPT,) = random_prompts(101, seed=4)


def computed(runner: TorchRunner, chunk: int, first_block: int) -> tuple[Tensor, Tensor]:
    """Logits after PROMPT [vocab], and the bytes of its blocks."""
    logits = logits_after(runner, PROMPT, chunk, first_block)
    return logits, runner.paged.memory.byte_blocks[first_block : first_block + 7].clone()


@pytest.mark.parametrize("quantization", [KV, BOTH])
def test_logits_and_blocks_are_the_same_to_the_bit_for_every_chunk(
    saved: Path, quantization: QuantizationConfig
) -> None:
    """A vector is quantised by itself: what is kept of it does not depend on what came with it, or after it."""
    runner = runner_of(saved, "bfloat16", quantization=quantization, backend="native")
    logits, blocks = computed(runner, 101, 0)
    for number, chunk in enumerate((1, 5, 16, 50)):
        other_logits, other_blocks = computed(runner, chunk, 8 * (number + 1))
        assert torch.equal(other_logits, logits)
        assert torch.equal(other_blocks, blocks)


def test_it_is_close_to_kv_as_it_was_computed_and_half_as_large(saved: Path) -> None:
    runners = [
        runner_of(saved, "bfloat16", quantization=quantization, backend="sdpa") for quantization in (AS_SAVED, KV, FP8)
    ]
    plain, *quantised = runners
    expected, _ = computed(plain, 30, 0)
    for runner, near in zip(quantised, (0.05, 0.1), strict=True):
        got, _ = computed(runner, 30, 0)
        assert not torch.equal(got, expected)
        assert (got - expected).float().norm() <= near * expected.float().norm()
        assert runner.layout.block_bytes == plain.layout.block_bytes * (16 + 2) // 32
    assert len({r.layout.fingerprint(r.info.weights_fingerprint) for r in runners}) == 3, "they exchange no blocks"


# -------------------------------------------------------------------------------- whatever else happens to a request

SAMPLING = {
    "greedy": SamplingParams(40, temperature=0, ignore_eos=True),
    "seeded": SamplingParams(40, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True),
}
PROMPTS = [PROMPT[:5], PROMPT[:16], PROMPT[10:41], PROMPT[50:90]]


@pytest.mark.parametrize("how", sorted(SAMPLING))
def test_speculation_preemption_prefix_hits_and_replay_change_no_token(saved: Path, how: str) -> None:
    """int8 weights and int8 KV, in bfloat16, where equal means equal to the bit."""
    sampling = SAMPLING[how]
    large = runner_of(saved, "bfloat16", quantization=BOTH)
    engine = TorchEngine(large)
    expected = all_ids(engine.ask(*requests(PROMPTS, sampling)))
    assert all(len(tokens) == 40 for tokens in expected.values())
    assert all_ids(engine.ask(*requests(PROMPTS, sampling))) == expected, "prefix hits"
    guessing = TorchEngine(large, StepBudget(96, 7), always(Recording(expected, VOCAB)))
    assert all_ids(guessing.ask(*requests(PROMPTS, sampling))) == expected, "speculation"
    small = runner_of(saved, "bfloat16", num_blocks=8, quantization=BOTH)
    crowded = TorchEngine(small, speculator=always(Recording(expected, VOCAB)))
    assert all_ids(crowded.ask(*requests(PROMPTS, sampling))) == expected, "preemption"
    assert crowded.num_preemptions >= 2
    for cut in (1, 17):
        emitted = {key: tokens[:cut] for key, tokens in expected.items()}
        rest = {key: tokens[cut:] for key, tokens in expected.items()}
        assert all_ids(TorchEngine(large).ask(*requests(PROMPTS, sampling, emitted))) == rest, "replay after a failover"


@pytest.mark.parametrize(("quantization", "backend"), [(BOTH, "auto"), pytest.param(FP8, "sdpa", marks=long)])
async def test_lent_over_a_real_transport(
    saved: Path, cluster_of: Any, ask: Any, quantization: QuantizationConfig, backend: Backend
) -> None:
    """Quantised blocks, with their scales, from a prefill worker; and from host memory, when they were evicted."""
    kinds = {"weights": quantization.weights, "kv_dtype": quantization.kv_dtype, "backend": backend}
    settings = kinds | {"kv_memory_mib": 1, "kv_host_memory_mib": 8}
    prompts = [random_prompts(400, seed=number)[0] for number in range(6)]
    local = TorchEngine(runner_of(saved, "bfloat16", quantization=quantization, backend=backend))
    sampling = SamplingParams(8, temperature=0, ignore_eos=True)
    expected = [ids(local.ask(request("r", prompt, sampling))["r", 0]) for prompt in prompts]
    async with cluster_of(saved, **settings) as cluster, Client(cluster.address) as client:
        answers = [await ask(client, prompt, ignore_eos=True) for prompt in prompts]
        assert [answer.token_ids for answer in answers] == expected
        assert all(answer.kv.moved_blocks == 24 for answer in answers)
        assert answers[0].kv.moved_bytes == 24 * local.runner.layout.block_bytes
        again = await asyncio.gather(*(ask(client, prompt, ignore_eos=True) for prompt in prompts))
        assert [answer.token_ids for answer in again] == expected


# ------------------------------------------------------------------------------------------------------------ refusals


def test_blocks_that_could_not_be_fingerprinted(tiny_model: Path) -> None:
    with pytest.raises(
        EngineStartError, match="kv_dtype: int8 blocks of 3 layers of 1 tokens x 16 are not a multiple of 8"
    ):
        TorchRunner(tiny_model, "float32", block_tokens=1, kv_bytes=1 << 20, quantization=KV)


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_fp8_has_no_kernels_on_a_cpu(saved: Path, backend: Backend) -> None:
    with pytest.raises(EngineStartError, match="kv_dtype: fp8 has no CPU kernels: use int8"):
        runner_of(saved, "bfloat16", quantization=FP8, backend=backend)
