"""Quantised weights on a GPU: kernels against the reference, whole models against the CPU, and room while loading."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.backends.torch.cuda.quantised import FLOAT8_CAPABILITY, Float8Linear, WeightOnlyLinear, gpu_linear
from engine.backends.torch.loader import load_model
from engine.backends.torch.quantised import QuantisedLinear, float8_product
from engine.backends.torch.runner import TorchRunner
from engine.core_types import Chunk, SamplingParams, Sequence
from engine.model.model_dir import ModelDir
from engine.model.quantization import QuantizationConfig, Weights
from support.packed_models import Packing, pack_model

Models = Callable[..., Path]
GPU = torch.device("cuda")
ROWS = (1, 3, 16, 17, 33, 64, 65, 128, 300, 2048)
SHAPES = [(64, 64), (70, 96), (1000, 1536), (4096, 4096), (333, 14336)]


def need_float8() -> None:
    if torch.cuda.get_device_capability() < FLOAT8_CAPABILITY:
        pytest.skip("this GPU does not multiply float8")


def layer(n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    generator = torch.Generator().manual_seed(n + k)
    made = nn.Linear(k, n, dtype=dtype)
    made.weight.data = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
    made.bias.data = torch.randn(n, generator=generator).to(dtype)
    return made


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(dtype).to(GPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@torch.inference_mode()
def test_kernels_equal_the_reference(n: int, k: int, kind: Weights, dtype: torch.dtype) -> None:
    reference = QuantisedLinear.of(layer(n, k, dtype), kind, GPU)
    made, rounding = WeightOnlyLinear.of(reference), torch.finfo(dtype).eps
    for rows in ROWS:
        x = randn(rows, k, dtype=dtype)
        exact, got = reference(x.float()), made(x).float()
        assert ((got - exact).abs() <= rounding * exact.abs() + 1e-4 * exact.abs().max()).all()


@pytest.mark.parametrize(
    ("group", "bits", "zeros", "order"),
    [(32, 4, True, False), (128, 4, True, True), (4096, 4, False, True), (128, 8, True, True)],
)
@torch.inference_mode()
def test_groups_of_checkpoints_equal_the_reference(group: int, bits: int, zeros: bool, order: bool) -> None:
    n, k, middle = 1000, 4096, 1 << bits - 1
    generator = torch.Generator().manual_seed(0)

    def integers(columns: int) -> Tensor:
        return torch.randint(-middle, middle, (n, columns), generator=generator, dtype=torch.int8)

    reference = QuantisedLinear(
        integers(k),
        (torch.rand(n, k // group, generator=generator) / middle / k**0.5).half(),
        None,
        torch.float16,
        bits=bits,
        zeros=integers(k // group) if zeros else None,
        order=torch.randperm(k, generator=generator) if order else None,
    ).to(GPU)
    made = WeightOnlyLinear.of(reference)
    for rows in ROWS:
        x = randn(rows, k, dtype=torch.float16)
        exact, got = reference(x.float()), made(x).float()
        assert ((got - exact).abs() <= 2**-10 * exact.abs() + 1e-4 * exact.abs().max()).all()


@pytest.mark.parametrize(("n", "k"), [(64, 64), (1008, 1536), (4096, 14336)])
@torch.inference_mode()
def test_float8_equals_its_reference(n: int, k: int) -> None:
    need_float8()
    saved = layer(n, k)
    made = gpu_linear(saved, "fp8", GPU)
    assert isinstance(made, Float8Linear)
    for rows in ROWS:
        x = randn(rows, k, dtype=torch.bfloat16)
        exact = float8_product(x, made.values, made.scales) + saved.bias.to(GPU).float()
        assert (made(x).float() - exact).abs().max() <= 0.01 * exact.abs().max()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_it_becomes_the_same_numbers_as_on_the_cpu(kind: Weights) -> None:
    """So one fingerprint is of one set of weights."""
    saved = layer(1000, 4096)
    on_cpu, on_gpu = QuantisedLinear.of(saved, kind), QuantisedLinear.of(saved, kind, GPU)
    assert torch.equal(on_cpu.values, on_gpu.values.cpu())
    assert torch.equal(on_cpu.scales, on_gpu.scales.cpu())


def prompt_logits(path: Path, device: str, backend: str, weights: Weights = "auto", dtype: str = "bfloat16") -> Tensor:
    """After a prompt, then after each of three tokens more, which CUDA graphs compute."""
    quantization = QuantizationConfig(weights=weights)
    runner = TorchRunner(path, dtype, 16, 32 << 20, backend=backend, device=device, quantization=quantization)  # type: ignore[arg-type]
    tokens = torch.randint(1, 900, (53,), generator=torch.Generator().manual_seed(0)).tolist()
    sequence = Sequence("a", tokens[:50], 50, b"", SamplingParams(1), 0, 0, blocks=[0, 2, 4, 6])
    rows = [runner.logits([Chunk(sequence, 0, 50)])[-1].float().cpu().clone()]
    for at in (50, 51, 52):
        sequence.token_ids.append(tokens[at])
        rows.append(runner.logits([Chunk(sequence, at, 1)])[-1].float().cpu().clone())
    return torch.stack(rows)


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("backend", ["flashinfer", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_computes_what_the_cpu_does(wide_model: Models, family: str, backend: str, weights: Weights) -> None:
    path = wide_model(family, "bfloat16")
    if weights == "fp8":
        need_float8()
        # each of 21 products of random weights adds 5 % of noise, and a CPU has no such products to compare with
        truth, allowed = prompt_logits(path, "cpu", "sdpa", dtype="float32"), 0.3
    else:
        truth, allowed = prompt_logits(path, "cpu", "sdpa", weights, dtype="float32"), 0.05
    assert (prompt_logits(path, "cuda", backend, weights) - truth).norm() < allowed * truth.norm()


@pytest.mark.parametrize(
    "packing", [Packing(group_size=128, symmetric=False, act_order=True), Packing("awq", group_size=128)]
)
def test_a_packed_checkpoint(wide_model: Models, tmp_path: Path, packing: Packing) -> None:
    pack_model(wide_model("llama", "bfloat16"), tmp_path / "packed", packing)
    truth = prompt_logits(tmp_path / "packed", "cpu", "sdpa", dtype="float32")
    got = prompt_logits(tmp_path / "packed", "cuda", "flashinfer")
    assert (got - truth).norm() < 0.05 * truth.norm()


@pytest.mark.parametrize(("weights", "share"), [("int8", 0.8), ("int4", 0.65)])
def test_only_what_weights_become_must_fit(wide_model: Models, weights: Weights, share: float) -> None:
    """Also while it is loaded, but for one layer in float32."""
    one_layer = 4 * 512 * 1024
    model_dir, room = ModelDir.open(wide_model("llama", "bfloat16")), dict[str, int]()
    for kind in ("auto", weights):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = load_model(model_dir, "bfloat16", GPU, QuantizationConfig(weights=kind))
        room[kind] = torch.cuda.memory_allocated() - before
        if kind != "auto":
            assert torch.cuda.max_memory_allocated() - before < room["auto"] + one_layer
        del model
    assert room[weights] < share * room["auto"]
