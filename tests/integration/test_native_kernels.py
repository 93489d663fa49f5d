"""The CPU kernels against plain torch, one by one; and what happens where they cannot be had."""

import logging
import platform
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from engine.backends.torch.attention import SdpaPagedAttention
from engine.backends.torch.native.decoder_layer import NativePagedAttention
from engine.backends.torch.native.kernels import LAYERS, LINEAR, TYPES, Kernels, attention_part
from engine.backends.torch.native.modules import NativeRmsNorm
from engine.backends.torch.runner import TorchRunner
from engine.core_types import Chunk, EngineSequence, SamplingParams
from engine.errors import KernelsUnavailable
from kvcache.layout import KvLayout


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels()


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(got: Tensor, exact: Tensor) -> None:
    """`got` is `exact` as bfloat16 holds it, give or take the order of a float32 sum."""
    assert ((got.float() - exact).abs() <= 0.005 * exact.abs() + 1e-3 * exact.abs().max()).all()


@pytest.mark.parametrize(("n", "k"), [(64, 64), (70, 100), (1, 2), (130, 2050), (896, 4864)])
@pytest.mark.parametrize("rows", [1, 5, 6, 7, 13, 257, 520])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(kernels: Kernels, n: int, k: int, rows: int, biased: bool) -> None:
    x, weights, bias = randn(1, rows, k), randn(n, k, seed=1), randn(n, seed=2) if biased else None
    exact = linear(x.float(), weights.float(), None if bias is None else bias.float())
    got = kernels.linear(x, kernels.pack(weights), bias)
    assert got.shape == (1, rows, n)
    assert_rounded(got, exact)


@pytest.mark.parametrize(("n", "k"), [(64, 64), (70, 100), (130, 2050)])
@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_adding_is_what_torch_adds_to_the_bit(kernels: Kernels, n: int, k: int, rows: int, biased: bool) -> None:
    x, packed, bias = randn(rows, k), kernels.pack(randn(n, k, seed=1)), randn(n, seed=2) if biased else None
    before = randn(rows, n, seed=3)
    after = before.clone()
    kernels.add_linear(after, x, packed, bias)
    assert torch.equal(after, before + kernels.linear(x, packed, bias))


@pytest.mark.parametrize(("n", "k"), [(32, 64), (96, 100), (4864, 896)])
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_gated(kernels: Kernels, n: int, k: int, rows: int) -> None:
    x, gate, up = randn(rows, k) / k**0.5, randn(n, k, seed=1), randn(n, k, seed=2)
    exact = silu(linear(x.float(), gate.float())) * linear(x.float(), up.float())
    assert_rounded(kernels.gated(x, kernels.pack_gated(gate, up)), exact)


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_a_result_is_the_same_however_many_threads_compute_it(kernels: Kernels, threads: int) -> None:
    x, packed = randn(300, 1030), kernels.pack(randn(777, 1030, seed=1))
    expected = kernels.linear(x, packed, None)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert all(torch.equal(kernels.linear(x, packed, None), expected) for _ in range(5))
    finally:
        torch.set_num_threads(before)


def test_embedding_from_packed_weights_is_exact(kernels: Kernels) -> None:
    weights = randn(300, 66)
    ids = torch.tensor([[0, 299, 64, 63, 128, 7]])
    assert torch.equal(kernels.embed(ids, kernels.pack(weights)), weights[ids])


def test_columns_after_the_last_are_not_written(kernels: Kernels) -> None:
    x, weights = randn(3, 64), randn(70, 64, seed=1)
    guarded = torch.full((4, 70), 7.0, dtype=torch.bfloat16)
    packed = kernels.pack(weights)
    linear_kernel = kernels.function(LINEAR, "tandem_linear")
    for adds in (False, True):
        linear_kernel(x.data_ptr(), 64, 3, packed.pointer, 70, 64, None, guarded.data_ptr(), 70, adds)
        assert (guarded[3] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 16, 100, 896])
def test_rms_norm(kernels: Kernels, dtype: torch.dtype, width: int) -> None:
    x, weight = randn(1, 20, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    exact = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
    tolerance = 1e-6 if dtype == torch.float32 else 0.01
    assert torch.allclose(kernels.rms_norm(x, weight, 1e-6).float(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_the_first_largest(kernels: Kernels, dtype: torch.dtype) -> None:
    rows = randn(9, 1003, dtype=dtype)
    rows[2, 500] = rows[2, 900] = rows[2, 1002] = 50
    rows[3, 1002] = rows[4, 0] = 50
    rows[5] = -torch.inf
    rows[5, 77] = -1e30
    assert torch.equal(kernels.argmax(rows), rows.float().argmax(-1))
    assert kernels.argmax(rows)[2] == 500


SHAPES = [(4, 2, 16), (4, 4, 80), (14, 2, 64), (6, 1, 128), (2, 2, 256)]
CHUNKS = [(0, 5), (3, 1), (17, 40), (600, 1), (250, 70), (255, 1), (256, 3), (0, 300)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("block_tokens", [16, 7, 64])
@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (24, 0.0), (300, 20.0)])
def test_attention_equals_the_reference(
    kernels: Kernels,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    window: int | None,
    softcap: float,
) -> None:
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 0.05)):
        layout = KvLayout(2, kv_heads, head_dim, block_tokens, str(dtype).removeprefix("torch."))
        tables = [layout.blocks_for(start + count) for start, count in CHUNKS]
        order = torch.randperm(sum(tables), generator=torch.Generator().manual_seed(3)).tolist()
        chunks, first = [], 0
        for (start, count), blocks in zip(CHUNKS, tables, strict=True):
            tokens = [0] * (start + count)
            sequence = EngineSequence("a", tokens, len(tokens), b"", 0, 0, sampling=SamplingParams(1))
            sequence.blocks = order[first : first + blocks]
            first += blocks
            chunks.append(Chunk(sequence, start, count))
        total = sum(count for _, count in CHUNKS)
        query = randn(1, heads, total, head_dim, dtype=dtype)
        key, value = (randn(1, kv_heads, total, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
        pool = randn(sum(tables), kv_heads, 2, 2, block_tokens, head_dim, dtype=dtype, seed=4)
        pools, results = [pool.clone(), pool.clone()], []
        backends = (SdpaPagedAttention(pools[0], layout), NativePagedAttention(kernels, pools[1], layout, heads))
        for attention in backends:
            attention.prepare(chunks)
            results.append(attention.attend(1, query, key, value, head_dim**-0.5, window, softcap))
        assert torch.equal(*pools), "the same keys and values were written"
        assert (results[0].float() - results[1].float()).abs().max() <= tolerance


def test_unread_memory_does_not_matter(kernels: Kernels) -> None:
    """What lies in a block after the sequence's end may be anything."""
    layout = KvLayout(1, 1, 64, 16, "float32")
    sequence = EngineSequence("a", [0] * 5, 5, b"", 0, 0, sampling=SamplingParams(1), blocks=[0])
    query, key, value = (randn(1, 1, 5, 64, dtype=torch.float32, seed=seed) for seed in range(3))
    results = []
    for filling in (0.0, torch.nan):
        pool = torch.full((1, 1, 1, 2, 16, 64), filling)
        attention = NativePagedAttention(kernels, pool, layout, 1)
        attention.prepare([Chunk(sequence, 0, 5)])
        results.append(attention.attend(0, query, key, value, 0.125, None, 0.0))
    assert torch.equal(*results)


def test_a_norm_that_computes_something_else_is_kept(make_model) -> None:  # type: ignore[no-untyped-def]
    def native_norms(family: str) -> int:
        runner = TorchRunner(make_model(family), "float32", 16, 1 << 20, backend="native")
        return sum(isinstance(module, NativeRmsNorm) for module in runner.paged.model.modules())

    assert native_norms("llama") == 7
    assert native_norms("gemma2") == 0, "Gemma's norm multiplies by 1 + weight"


@pytest.mark.parametrize("cpu", ["x86-64", "haswell", "skylake-avx512", "cooperlake", "sapphirerapids"])
def test_every_source_is_code_for_every_cpu(cpu: str) -> None:
    """Of CPUs that multiply bfloat16 or do not; only this machine's is run elsewhere."""
    if platform.machine() != "x86_64":
        pytest.skip("these CPUs are x86-64's")
    for part in (LAYERS, LINEAR, *map(attention_part, TYPES)):
        source = part.compiled()
        command = ["g++", "-fsyntax-only", "-std=c++20", "-w", f"-march={cpu}", *source.flags, str(source.path)]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, f"{part}: {checked.stderr[:2000]}"


def test_without_a_compiler_auto_says_so_and_native_refuses(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        runner = TorchRunner(tiny_model, "float32", 16, 1 << 20)
    assert "/no/such/compiler" in caplog.text
    assert runner.backend == "sdpa"
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler"):
        TorchRunner(tiny_model, "float32", 16, 1 << 20, backend="native")


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'this is no compiler' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match="this is no compiler"):
        Kernels()
