"""Linear layers of GPUs with quantised weights: the kernels, run by Triton's interpreter, against the reference."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.backends.torch.cuda import linear_kernels, quantised
from engine.backends.torch.cuda.linear_kernels import num_splits, rows_to_float8
from engine.backends.torch.cuda.modules import fuse, is_linear, join_layers
from engine.backends.torch.cuda.quantised import Float8Linear, WeightOnlyLinear, check_gpu, gpu_linear, pack_int4
from engine.backends.torch.loader import load_model
from engine.backends.torch.quantised import QuantisedLinear, float8_product, float8_rows, quantise_linears
from engine.errors import EngineStartError
from engine.model.model_dir import ModelDir
from engine.model.quantization import QuantizationConfig, Weights
from support import triton_cpu
from support.fake_flashinfer import FakeFlashinfer
from support.long_runs import mostly_long
from support.triton_compiler import in_a_process

CPU = torch.device("cpu")
ROWS = (1, 3, 17, 70)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-18}
"""Half of a last place; in float32, what sums of another order make of it."""
MakeModel = Callable[..., Path]


@pytest.fixture(autouse=True)
def rounded_like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_cpu.install(monkeypatch)


@pytest.fixture(params=[1, 64], ids=["one program", "split"])
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with as many, whether programs share the reduction."""
    monkeypatch.setattr(linear_kernels, "_processors", lambda device: request.param)


def layer(n: int, k: int, dtype: torch.dtype = torch.bfloat16, bias: bool = False, seed: int = 1) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    made = nn.Linear(k, n, bias=bias, dtype=dtype)
    made.weight.data = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
    if bias:
        made.bias.data = torch.randn(n, generator=generator).to(dtype)
    return made


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def grouped(n: int, k: int, group: int, bits: int, zeros: bool, order: bool, dtype: torch.dtype) -> QuantisedLinear:
    """As a checkpoint of GPTQ may hold it."""
    generator, middle = torch.Generator().manual_seed(n + k), 1 << bits - 1

    def integers(columns: int) -> Tensor:
        return torch.randint(-middle, middle, (n, columns), generator=generator, dtype=torch.int8)

    return QuantisedLinear(
        integers(k),
        (torch.rand(n, k // group, generator=generator) / middle / k**0.5).half(),
        randn(n, dtype=dtype),
        dtype,
        bits=bits,
        zeros=integers(k // group) if zeros else None,
        order=torch.randperm(k, generator=generator) if order else None,
    )


def agree(made: nn.Module, reference: nn.Module, x: Tensor) -> None:
    got, exact = made(x), reference(x.float())
    assert got.dtype == x.dtype
    assert got.shape == exact.shape
    assert ((got.float() - exact).abs() <= ROUNDING[x.dtype] * (exact.abs() + 0.2 * exact.abs().max())).all()


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (70, 96), (33, 480)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_made_here(n: int, k: int, kind: Any, dtype: torch.dtype) -> None:
    reference = QuantisedLinear.of(layer(n, k, dtype, bias=n == 70), kind)
    made = WeightOnlyLinear.of(reference)
    assert made.bits == (4 if kind == "int4" else 8)
    for rows in ROWS:
        agree(made, reference, randn(rows, k, dtype=dtype))


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize(
    ("group", "bits", "zeros", "order"),
    [
        (32, 4, True, False),
        (64, 4, True, True),
        (128, 4, False, True),
        (384, 4, True, False),
        (48, 4, False, False),
        (128, 8, True, True),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_weights_of_checkpoints(group: int, bits: int, zeros: bool, order: bool, dtype: torch.dtype) -> None:
    reference = grouped(70, 384, group, bits, zeros, order, dtype)
    for rows in (3, 70):
        agree(WeightOnlyLinear.of(reference), reference, randn(rows, 384, dtype=dtype))


def test_inputs_that_no_kernel_divides() -> None:
    reference = QuantisedLinear.of(layer(5, 50), "int4")
    assert not reference.grouped
    agree(WeightOnlyLinear.of(reference), reference, randn(3, 50, dtype=torch.bfloat16))
    with pytest.raises(EngineStartError, match="groups of 24 inputs are not a multiple of 16"):
        WeightOnlyLinear.of(grouped(8, 48, 24, 4, False, False, torch.bfloat16))


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_inputs_of_other_strides_and_shapes(kind: Weights) -> None:
    made = gpu_linear(layer(48, 64, bias=True), kind, CPU)
    x = randn(2, 5, 64, dtype=torch.bfloat16)
    wanted = made(x)
    assert wanted.shape == (2, 5, 48)
    assert torch.equal(made(x.flatten(0, 1)), wanted.flatten(0, 1))
    assert torch.equal(made(x.transpose(0, 1).contiguous().transpose(0, 1)), wanted)
    assert torch.equal(made(x.transpose(1, 2).contiguous().transpose(1, 2)), wanted)
    beside = torch.cat([x, x], -1)[..., 64:]
    assert torch.equal(made(beside), wanted)
    assert made(x[:0]).shape == (0, 5, 48)


def test_two_values_a_byte() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(24).view(3, 128)
    packed = pack_int4(values, 64)
    assert packed.shape == (2, 3, 32)
    low, high = int(values[2, 64 + 5]) + 8, int(values[2, 64 + 32 + 5]) + 8
    assert packed[1, 2, 5] == low + 16 * high


def test_a_reduction_is_shared_equally_until_the_gpu_is_busy() -> None:
    assert num_splits(tiles=1, blocks=12, processors=100) == 4, "12 = 4 x 3"
    assert num_splits(tiles=1, blocks=64, processors=100) == 16, "no more than that"
    assert num_splits(tiles=100, blocks=64, processors=100) == 4
    assert num_splits(tiles=1000, blocks=64, processors=100) == 1


# ------------------------------------------------------------------------------------------------------------- fp8


@pytest.mark.parametrize("k", [16, 100, 4100])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_become_float8_as_torch_makes_them(k: int, dtype: torch.dtype) -> None:
    x = randn(6, k, dtype=torch.float32) * torch.tensor([1, 300, 1e-4, 0, 1, 1])[:, None]
    x[4] = 2.0 ** torch.linspace(-30, 0, k)  # also what float8 has no exponent for
    x = x.to(dtype)
    (values, scales), (wanted, wanted_scales) = rows_to_float8(x), float8_rows(x)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(values.float(), wanted.float())


@pytest.mark.parametrize("dtype", FLOATS)
def test_float8_equals_its_reference(dtype: torch.dtype) -> None:
    saved = layer(48, 160, dtype, bias=True)
    made = Float8Linear.of(saved, CPU)
    for rows in ROWS:
        x = randn(rows, 160, dtype=dtype)
        exact = float8_product(x, made.values, made.scales) + saved.bias.float()
        got, size = made(x), exact.abs().max()
        assert got.dtype == dtype
        assert (got.float() - exact).abs().max() <= 2**-7 * size, "rounded to bfloat16"
        assert 0 < (exact - saved(x).float()).norm() < 0.05 * exact.norm(), "near to what was saved"


def test_what_float8_does_not_take_stays_as_saved() -> None:
    saved = layer(40, 64)
    assert gpu_linear(saved, "fp8", CPU) is saved
    assert isinstance(gpu_linear(layer(48, 64), "fp8", CPU), Float8Linear)


# ---------------------------------------------------------------------------------------------------- whole models


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(torch.arange(1, 20)[None], use_cache=False).logits[0].float()
    return out


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_a_model_is_quantised_as_on_the_cpu_and_fused(make_model: MakeModel, kind: Weights) -> None:
    model_dir = ModelDir.open(make_model("qwen2", dtype="bfloat16"))
    model = load_model(model_dir, "auto", CPU)
    saved = logits(model)
    quantise_linears(model, kind, partial(gpu_linear, device=CPU))
    kinds = {name: type(module) for name, module in model.named_modules() if is_linear(module)}
    assert kinds.pop("lm_head") is WeightOnlyLinear
    assert set(kinds.values()) == {Float8Linear if kind == "fp8" else WeightOnlyLinear}
    got, noise = logits(model), 0.05 * saved.norm()
    if kind != "fp8":
        reference = load_model(model_dir, "float32", CPU, QuantizationConfig(weights=kind))
        assert (got - logits(reference)).norm() < noise
    else:
        assert (got - saved).norm() < 0.2 * saved.norm()
    fused = fuse(model, FakeFlashinfer())
    assert (fused.mlps, fused.projections) == (3, 3)
    assert (logits(model) - got).norm() < noise


def test_a_layer_is_replaced_before_the_next_is_made(make_model: MakeModel) -> None:
    """So that on a GPU there is room for what the weights become, and one layer as it was."""
    model, left = load_model(ModelDir.open(make_model("llama")), "auto", CPU), list[int]()

    def make(linear: nn.Linear, kind: Weights) -> nn.Module:
        left.append(sum(type(module) is nn.Linear for module in model.modules()))
        return gpu_linear(linear, kind, CPU)

    quantise_linears(model, "int8", make)
    assert left == list(range(3 * 7 + 1, 0, -1))


def test_only_layers_of_one_kind_are_joined() -> None:
    x = randn(3, 64, dtype=torch.bfloat16)
    made: dict[str, Any] = {
        "saved": layer(32, 64),
        "int8": gpu_linear(layer(32, 64), "int8", CPU),
        "int4": gpu_linear(layer(32, 64), "int4", CPU),
        "fp8": gpu_linear(layer(32, 64), "fp8", CPU),
        "zeros": WeightOnlyLinear.of(grouped(32, 64, 32, 4, True, False, torch.bfloat16)),
        "none": WeightOnlyLinear.of(grouped(32, 64, 32, 4, False, False, torch.bfloat16)),
        "ordered": WeightOnlyLinear.of(grouped(32, 64, 32, 4, True, True, torch.bfloat16)),
    }
    able = {frozenset(pair) for pair in (("zeros", "none"), *((name, name) for name in made))}
    for first, one in made.items():
        for second, other in made.items():
            joined = join_layers([one, other])
            assert (joined is not None) == (frozenset((first, second)) in able), (first, second)
            if joined is not None:
                assert torch.equal(joined(x), torch.cat([one(x), other(x)], -1))
    other_order = WeightOnlyLinear.of(grouped(32, 64, 32, 4, True, True, torch.bfloat16))
    other_order.order = other_order.order.flip(0)  # type: ignore[union-attr]
    assert join_layers([made["ordered"], other_order]) is None


class Strange(nn.Parameter):
    """As torchao's."""


def test_a_weight_of_another_class_is_not_joined() -> None:
    one, other = layer(32, 64), layer(32, 64)
    other.weight = Strange(other.weight.data)
    assert is_linear(one)
    assert not is_linear(other)


# -------------------------------------------------------------------------------------------------------- refusals


def test_fp8_on_a_cpu(tiny_model: Path) -> None:
    with pytest.raises(EngineStartError, match="weights: fp8 needs a GPU: use int8 on the CPU"):
        load_model(ModelDir.open(tiny_model), "auto", CPU, QuantizationConfig(weights="fp8"))


def test_fp8_on_older_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(EngineStartError, match=r"weights: fp8 needs .* 8\.9 .*, this GPU has 8\.0"):
        check_gpu("fp8", CPU)
    check_gpu("int8", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_gpu("fp8", CPU)


def test_fp8_where_torch_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("row-wise scaling is not supported")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(torch, "_scaled_mm", fail)
    with pytest.raises(EngineStartError, match=r"weights: torch does not multiply float8 .* row-wise"):
        check_gpu("fp8", CPU)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("engine.backends.torch.cuda.linear_kernels")
    monkeypatch.setitem(sys.modules, "engine.backends.torch.cuda.linear_kernels", None)
    with pytest.raises(EngineStartError, match="weights: quantised weights on a GPU need Triton"):
        quantised.load_kernels()


# -------------------------------------------------------------------------------------------------------- compiling


@pytest.mark.parametrize("capabilities", mostly_long([("90",), ("80", "89", "120")], ("90",)))
def test_kernels_compile_for_gpus(capabilities: tuple[str, ...]) -> None:
    """The compiler needs no GPU; it needs a process whose Triton does not interpret."""
    assert in_a_process("compiled_linears", *capabilities) == ""
