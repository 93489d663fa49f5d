"""The GPU's own kernels of attention: by Triton's interpreter against the reference, and compiled for GPUs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.torch.attention import use_attention
from engine.backends.torch.cuda import attention_kernels
from engine.backends.torch.cuda.graphs import Captured, DecodeGraphs
from engine.backends.torch.cuda.triton_attention import TritonPagedAttention
from engine.backends.torch.device import allocate
from engine.backends.torch.kv.rows import kv_rows
from engine.backends.torch.loading.loader import kv_layout, load_model
from engine.backends.torch.sdpa import SdpaPagedAttention
from engine.core_types import Chunk, SamplingParams, Sequence
from engine.kv.layout import KvDtype, KvLayout
from engine.model.model_dir import ModelDir
from support import triton_cpu
from support.long_runs import long
from support.triton_compiler import in_a_process

CPU = torch.device("cpu")
CHUNKS = [(130, 1), (3, 1), (0, 5), (17, 20), (70, 34), (40, 1)]
"""(start, tokens): two decodes, then what goes to the kernel for prompts, a single token among it."""


@pytest.fixture(autouse=True)
def rounded_like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_cpu.install(monkeypatch)


def randn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spread(layout: KvLayout) -> tuple[list[Chunk], int]:
    """CHUNKS, their blocks dealt out at random; and how many blocks."""
    counts = [layout.blocks_for(start + count) for start, count in CHUNKS]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).tolist()
    chunks = []
    for start, count in CHUNKS:
        sequence = Sequence("a", [0] * (start + count), start + count, b"", SamplingParams(1), 0, 0)
        sequence.blocks = [order.pop() for _ in range(layout.blocks_for(start + count))]
        chunks.append(Chunk(sequence, start, count))
    return chunks, sum(counts)


@pytest.mark.parametrize(
    ("kept", "dtype", "heads", "kv_heads", "head_dim", "block_tokens", "window", "softcap", "processors"),
    [
        pytest.param("auto", "float32", 4, 2, 16, 64, 60, 20.0, 1, marks=long),
        ("auto", "bfloat16", 6, 1, 80, 7, None, 0.0, 40),
        ("int8", "float16", 14, 2, 64, 16, None, 0.0, 40),
        pytest.param("int8", "bfloat16", 2, 1, 6, 7, 24, 20.0, 10, marks=long),
        ("fp8", "bfloat16", 4, 4, 80, 16, 24, 0.0, 1),
        pytest.param("fp8", "float32", 6, 1, 128, 7, None, 30.0, 40, marks=long),
    ],
)
def test_attention_equals_the_reference(
    kept: KvDtype,
    dtype: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    window: int | None,
    softcap: float,
    processors: int,
) -> None:
    """With as many `processors` as make it split contexts, and with one. What it writes is the same to the bit."""
    layout = KvLayout(2, kv_heads, head_dim, block_tokens, dtype, kept)
    chunks, num_blocks = spread(layout)
    computed: torch.dtype = getattr(torch, dtype)
    total = sum(count for _, count in CHUNKS)
    query = randn(1, total, heads, head_dim, dtype=computed, seed=0).transpose(1, 2)  # as projections leave it
    key, value = (randn(1, kv_heads, total, head_dim, dtype=computed, seed=seed) for seed in (1, 2))
    pools, results = [], []
    for ours in (False, True):
        pool = allocate(layout, num_blocks, CPU).tensor
        slots = torch.arange(pool.numel() * pool.element_size() // layout.vector_bytes)
        kv_rows(pool, layout).write(slots, randn(len(slots), head_dim, dtype=computed, seed=4))
        attention: TritonPagedAttention | SdpaPagedAttention = SdpaPagedAttention(pool, layout)
        if ours:
            attention = TritonPagedAttention(attention_kernels, pool, layout, heads, processors)
            assert attention._splits(2) == {1: 1, 10: 8, 40: 16 if kv_heads == 2 else 32}[processors]
        attention.prepare(chunks)
        results.append(attention.attend(1, query, key, value, head_dim**-0.5, window, softcap).float())
        pools.append(pool)
    assert torch.equal(pools[0].view(torch.uint8), pools[1].view(torch.uint8))
    assert results[1].shape == results[0].shape
    assert (results[0] - results[1]).abs().max() <= (1e-5 if computed == torch.float32 else 0.03)


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_vectors_at_the_ends_of_the_range_are_written_as_the_reference_writes_them(kept: KvDtype) -> None:
    layout = KvLayout(1, 1, 64, 16, "float32", kept)
    vectors = randn(16, 64, dtype=torch.float32, seed=5) * 10.0 ** torch.arange(-40, 40, 5)[:, None]
    vectors[3], vectors[4, 0], vectors[5] = 0, 3e38, torch.linspace(-448, 448, 64)
    sequence = Sequence("a", [0] * 16, 16, b"", SamplingParams(1), 0, 0, blocks=[1])
    pools = []
    for ours in (False, True):
        pool = allocate(layout, 2, CPU).tensor
        attention = TritonPagedAttention(attention_kernels, pool, layout, 1, 1) if ours else None
        if attention is None:
            kv_rows(pool, layout).write(torch.arange(16) + 2 * 16, vectors)
        else:
            attention.prepare([Chunk(sequence, 0, 16)])
            attention._write(vectors[None], 0)
        pools.append(pool)
    assert torch.equal(*pools)


def test_a_model_computes_in_buckets_what_it_computes_without(make_model: Callable[..., Path]) -> None:
    """Prompts in chunks, then decodes as graphs would run them, padded, over fp8 blocks."""
    path = make_model("qwen2")
    model = load_model(ModelDir.open(path), "float32", CPU)
    layout = kv_layout(model, 16, "fp8")
    results = {}
    for name in ("sdpa", "triton"):
        pool = allocate(layout, 16, CPU).tensor
        triton = TritonPagedAttention(attention_kernels, pool, layout, 4, 4)
        attention = triton if name == "triton" else SdpaPagedAttention(pool, layout)
        use_attention(model, attention)
        sequences = [
            Sequence("a", list(range(5, 5 + n)), n, b"", SamplingParams(1), 0, 0, blocks=list(range(3 * i, 3 * i + 3)))
            for i, n in enumerate((21, 16, 9))
        ]

        def forward(token_ids: Tensor, positions: Tensor) -> Tensor:
            logits: Tensor = model(input_ids=token_ids, position_ids=positions, use_cache=False).logits[0]
            return logits

        def compute(chunks: list[Chunk]) -> Tensor:
            attention.prepare(chunks)  # noqa: B023
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            positions = [p for chunk in chunks for p in range(chunk.start, chunk.start + chunk.num_rows)]
            return forward(torch.tensor([tokens]), torch.tensor([positions]))

        with torch.inference_mode():
            compute([Chunk(sequences[0], 0, 15), Chunk(sequences[1], 0, 15), Chunk(sequences[2], 0, 8)])
            compute([Chunk(sequences[0], 15, 5)])
            last = [Chunk(sequence, sequence.num_tokens - 1, 1) for sequence in sequences]
            results[name] = compute(last)
            if name == "triton":
                graphs = DecodeGraphs(
                    triton, layout, forward, repeated(triton), scratch_block=15, max_blocks=3, batches=(2, 4)
                )
                for chosen in (last, last[1:], last[:1]):
                    again = graphs.logits(chosen)
                    rows = [last.index(chunk) for chunk in chosen]
                    assert torch.allclose(again, results[name][rows], atol=1e-5)
    assert torch.allclose(results["sdpa"], results["triton"], atol=1e-5)


def repeated(attention: TritonPagedAttention) -> Callable[[Callable[[], Tensor]], Captured]:
    """In the place of a graph: computed again at each replay, from the buffers of its step."""

    def capture(compute: Callable[[], Tensor]) -> Captured:
        step = attention.step
        output = compute()

        def replay() -> None:
            attention.step = step
            output.copy_(compute())

        return Captured(output, replay)

    return capture


def test_kernels_compile_for_gpus_and_keep_to_their_registers() -> None:
    """Triton's compiler needs no GPU. In a process of its own: here its functions are the interpreter's."""
    assert in_a_process("compiled_attention") == ""
