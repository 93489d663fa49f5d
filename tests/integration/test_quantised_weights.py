"""Linear layers with quantised weights: the kernels against the reference, and whole models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engine.backends.torch.loading.loader import load_model
from engine.backends.torch.loading.quantised import GROUP, QuantisedLinear, quantise, quantise_groups
from engine.backends.torch.native.kernels import QUANTISED, Kernels
from engine.backends.torch.native.modules import PackedGatedMlp, PackedLinear
from engine.backends.torch.runner import BuiltModel, TorchRunner
from engine.core_types import Chunk
from engine.errors import EngineStartError, ModelRefused
from engine.model.model_dir import ModelDir
from engine.model.quantization import AS_SAVED, QuantizationConfig
from support.long_runs import mostly_long
from support.torch_models import copy_with, in_blocks, logits_after, random_prompts, runner_of

INT8, INT4 = QuantizationConfig(weights="int8"), QuantizationConfig(weights="int4")
ROWS = [1, 2, 3, 4, 5, 6, 7, 13, 257, 520]
MakeModel = Callable[..., Path]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def integers(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randint(-127, 128, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def layer(n: int, k: int, bias: bool = False, seed: int = 1) -> nn.Linear:
    made = nn.Linear(k, n, bias=bias, dtype=torch.bfloat16)
    made.weight.data = randn(n, k, seed=seed) / k**0.5
    if bias:
        made.bias.data = randn(n, seed=seed + 1)
    return made


# ------------------------------------------------------------------------------------------------------ one by one


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(1e-6, 1e6))
def test_a_weight_is_its_nearest_multiple_of_the_scale(seed: int, size: float) -> None:
    weights = (torch.randn(5, 24, generator=torch.Generator().manual_seed(seed)) * size).bfloat16()
    weights[3] = 0
    values, scales = quantise(weights)
    made = values.float() * scales[:, None]
    assert (made - weights.float()).abs().le(scales[:, None] * 0.5001).all()
    assert values[torch.arange(3), weights[:3].abs().argmax(-1)].abs().eq(127).all(), "the whole range is used"
    assert made[3].eq(0).all()


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(1e-6, 1e6))
def test_an_int4_weight_is_its_nearest_multiple_unless_it_is_the_group_s_other_extreme(seed: int, size: float) -> None:
    weights = (torch.randn(5, 3 * GROUP, generator=torch.Generator().manual_seed(seed)) * size).bfloat16()
    weights[3] = 0
    values, scales = quantise_groups(weights)
    assert values.min() >= -8
    assert values.max() <= 7
    steps = weights.float().view(5, 3, GROUP) / scales.float()[..., None]
    errors = (values.view(5, 3, GROUP) - steps).abs()
    assert errors.le(torch.where((steps > -8) & (steps < 7.5), 0.5, 1.1)).all()
    assert values.view(5, 3, GROUP).amin(-1)[:3].eq(-8).all(), "the whole range is used"
    assert values[3].eq(0).all()


@pytest.mark.parametrize(("n", "k"), [(64, 64), (70, 96), (1, 32), (896, 4864)])
def test_int4_is_the_same_to_the_bit_for_any_number_of_rows(kernels: Kernels, n: int, k: int) -> None:
    x, bias = randn(520, k), randn(n, seed=3)
    packed = kernels.pack_int4(*quantise_groups(layer(n, k).weight.data))
    expected = kernels.linear(x, packed, bias)
    for rows in ROWS:
        assert torch.equal(kernels.linear(x[:rows].contiguous(), packed, bias), expected[:rows])


@pytest.mark.parametrize(("n", "k"), [(64, 64), (70, 100), (1, 2), (130, 2050), (896, 4864)])
@pytest.mark.parametrize("rows", ROWS)
def test_int8_is_bfloat16_of_the_same_integers_to_the_bit(kernels: Kernels, n: int, k: int, rows: int) -> None:
    """Every value from -127 to 127 is exact in bfloat16, and the sums run in the same order."""
    x, values, bias = randn(rows, k), integers(n, k), randn(n, seed=3)
    plain = kernels.linear(x, kernels.pack(values.bfloat16()), bias)
    assert torch.equal(kernels.linear(x, kernels.pack_int8(values, torch.ones(n)), bias), plain)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 300])
def test_linear_equals_the_reference(kernels: Kernels, rows: int, biased: bool, kind: Any) -> None:
    reference = QuantisedLinear.of(layer(200, 1504, biased), kind)
    assert reference.grouped == (kind == "int4")
    x = randn(1, rows, 1504)
    exact, got = reference(x.float()), PackedLinear.of(kernels, reference)(x).float()
    assert ((got - exact).abs() <= 0.005 * exact.abs() + 1e-5 * exact.abs().max()).all()


@pytest.mark.parametrize(("kind", "k"), [("int8", 70), ("int4", 70), ("int4", 64)])
@pytest.mark.parametrize("rows", [1, 6, 300])
def test_gated_equals_the_reference(kernels: Kernels, rows: int, kind: Any, k: int) -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (
                QuantisedLinear.of(layer(n, k, seed=seed), kind)
                for seed, (n, k) in enumerate([(96, k), (96, k), (k, 96)])
            )

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
            return out

    mlp, x = Mlp(), randn(rows, k)
    exact, got = mlp(x.float()), PackedGatedMlp(kernels, mlp)(x).float()
    assert (got - exact).abs().max() <= 0.01 * exact.abs().max()


def test_columns_after_the_last_are_not_written(kernels: Kernels) -> None:
    x, packed = randn(3, 64), kernels.pack_int8(integers(70, 64), torch.ones(70))
    guarded = torch.full((4, 70), 7.0, dtype=torch.bfloat16)
    at, to = x.data_ptr(), guarded.data_ptr()
    for adds in (False, True):
        kernels._function(QUANTISED, "tandem_linear_int8")(at, 64, 3, *packed.arguments, 70, 64, None, to, 70, adds)
        assert (guarded[3] == 7).all()
    assert (guarded[:3] != 7).any()


# ---------------------------------------------------------------------------------------------------- whole models


(PROMPT,) = random_prompts(101, seed=4)


@pytest.mark.parametrize("family", mostly_long(["llama", "qwen2", "gemma2"], "gemma2"))
@pytest.mark.parametrize("quantization", [INT8, INT4])
@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_either_backend_is_as_near_to_the_truth_as_bfloat16_can_be(
    make_model: MakeModel, family: str, backend: str, quantization: QuantizationConfig
) -> None:
    """The truth: the same quantised weights, computed in float32. The noise: what bfloat16 costs weights as saved."""
    path = make_model(family, dtype="bfloat16")

    def every_logit(dtype: str, quantization: QuantizationConfig, backend: str) -> Tensor:
        runner = runner_of(path, dtype, quantization=quantization, backend=backend)
        return torch.stack([logits_after(runner, PROMPT[: end + 1], 30) for end in range(0, 101, 10)]).double()

    truth = every_logit("float32", quantization, "sdpa")
    noise = (every_logit("bfloat16", AS_SAVED, "sdpa") - every_logit("float32", AS_SAVED, "sdpa")).abs().mean()
    step = (truth - every_logit("float32", AS_SAVED, "sdpa")).abs().mean()
    assert (every_logit("bfloat16", quantization, backend) - truth).abs().mean() <= 1.3 * noise
    assert step > 0, "the weights are others than the saved ones"


@pytest.mark.parametrize("quantization", [INT8, INT4])
def test_logits_are_the_same_to_the_bit_for_every_chunk_and_company(
    make_model: MakeModel, kernels: Kernels, quantization: QuantizationConfig
) -> None:
    runner = runner_of(make_model("qwen2", dtype="bfloat16"), "bfloat16", quantization=quantization, backend="native")
    expected = logits_after(runner, PROMPT, 101)
    for chunk in (1, 4, 6, 7, 50):
        assert torch.equal(logits_after(runner, PROMPT, chunk), expected)
    together = runner.logits([Chunk(in_blocks(runner, PROMPT, 20 * number), 0, 101) for number in range(3)])
    assert all(torch.equal(row, expected) for row in together)


@pytest.mark.parametrize(("family", "tied"), [("qwen2", False), ("gemma2", True)])
def test_every_linear_layer_is_quantised_and_the_embedding_is_not(
    make_model: MakeModel, family: str, tied: bool
) -> None:
    path = make_model(family, dtype="bfloat16")
    assert ModelDir.open(path).config["tie_word_embeddings"] is tied
    model = load_model(ModelDir.open(path), "auto", torch.device("cpu"), INT8)
    saved = load_model(ModelDir.open(path), "auto", torch.device("cpu"))
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert isinstance(model.lm_head, QuantisedLinear)
    assert torch.equal(model.get_input_embeddings().weight, saved.get_input_embeddings().weight)  # type: ignore[operator]
    values, scales = quantise(saved.lm_head.weight.data)  # type: ignore[union-attr,arg-type]
    assert torch.equal(model.lm_head.values, values)
    assert torch.equal(model.lm_head.scales, scales)


def test_int4_is_of_all_but_the_output_layer(make_model: MakeModel) -> None:
    model = load_model(ModelDir.open(make_model("qwen2", dtype="bfloat16")), "auto", torch.device("cpu"), INT4)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}
    assert [name for name, module in layers.items() if not module.grouped] == ["lm_head"]


def test_unlike_weights_have_unlike_fingerprints(tiny_model: Path) -> None:
    runners = [runner_of(tiny_model, quantization=quantization) for quantization in (AS_SAVED, INT8, INT4)]
    assert len({runner.layout for runner in runners}) == 1
    assert len({runner.info.weights_fingerprint for runner in runners}) == 3


# -------------------------------------------------------------------------------------------------------- refusals


def test_a_model_whose_weights_are_not_in_linear_layers(make_model: MakeModel) -> None:
    with pytest.raises(EngineStartError, match=r"weights: int8 quantises linear layers, which hold only \d+ %"):
        runner_of(make_model("mixtral", dtype="bfloat16"), "bfloat16", quantization=INT8)


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ({"quant_method": "telepathy", "bits": 4}, "quantised by telepathy, which transformers does not support"),
        ({"bits": 4}, "does not name, which transformers does not support"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq, but the files have no packed weights"),
        ({"quant_method": "hqq"}, "transformers cannot load it: .*hqq"),
    ],
)
def test_saved_quantised_by_what_is_not_here(tiny_model: Path, tmp_path: Path, method: Any, why: str) -> None:
    path = copy_with(tiny_model, tmp_path / "quantised", quantization_config=method)
    with pytest.raises(ModelRefused, match=why):
        runner_of(path, "bfloat16")


@pytest.mark.parametrize("quantization", [INT8, INT4])
def test_a_gpu_is_for_vllm(tiny_model: Path, quantization: QuantizationConfig) -> None:
    """Refused before anything is moved to the device."""
    with pytest.raises(EngineStartError, match=r"weights: int\d is for CPUs only: .* vllm_args: --quantization fp8"):
        load_model(ModelDir.open(tiny_model), "auto", torch.device("cuda"), quantization)


def test_saved_quantised_and_quantised_again(tiny_model: Path, tmp_path: Path) -> None:
    path = copy_with(tiny_model, tmp_path / "quantised", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(EngineStartError, match=r"weights: only auto is possible: .* already quantised, by gptq"):
        runner_of(path, "bfloat16", quantization=INT8)


def test_files_that_lack_a_weight(make_model: MakeModel, tmp_path: Path) -> None:
    """transformers would draw it at random."""
    from safetensors.torch import load_file, save_file

    path = copy_with(make_model("llama"), tmp_path / "lacking")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelRefused, match=r"lack 1 of its weights, model\.layers\.1\.mlp\.up_proj\.weight"):
        runner_of(path, "bfloat16")


def test_a_weight_of_another_class_is_left_to_transformers(kernels: Kernels) -> None:
    """As torchao's: a linear layer by its type, whose memory holds something else."""
    from engine.backends.torch.native.packing import can_pack

    class Strange(nn.Parameter):
        pass

    plain = layer(64, 64)
    assert can_pack(plain)
    plain.weight = Strange(plain.weight.data)
    assert not can_pack(plain)


class Wrapped(Tensor):
    """As torchao's: it knows how to be multiplied, and little else."""

    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor) -> "Wrapped":
        made: Wrapped = Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype)  # type: ignore[attr-defined]
        made.plain = plain
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, *bias = args
            return nn.functional.linear(x, weight.plain, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapped(args[0].plain)
        raise NotImplementedError(func)


def test_a_model_with_weights_of_another_class_is_served(make_model: MakeModel, kernels: Kernels) -> None:
    path, prompt = make_model("llama", dtype="bfloat16"), random_prompts(40, seed=4)[0]
    plain = runner_of(path, "bfloat16")
    model = load_model(ModelDir.open(path), "bfloat16", torch.device("cpu"))
    projection: nn.Linear = model.get_submodule("model.layers.1.self_attn.o_proj")  # type: ignore[assignment]
    projection.weight = nn.Parameter(Wrapped(projection.weight.data), requires_grad=False)
    runner = TorchRunner(BuiltModel(model, plain.info), "bfloat16", 16, 8 << 20)
    got, expected = logits_after(runner, prompt).float(), logits_after(plain, prompt).float()
    assert runner.backend == "native"
    assert (got - expected).norm() < 0.02 * expected.norm()
