"""Checkpoints of GPTQ, AWQ and float8: made by independent packers, loaded, compared with what they stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.backends.torch.loading import packed
from engine.backends.torch.loading.loader import load_model
from engine.backends.torch.loading.quantised import QuantisedLinear
from engine.backends.torch.loading.sharding import refuse_by_plan
from engine.errors import EngineStartError, ModelRefused
from engine.model.model_dir import ModelDir
from engine.model.quantization import QuantizationConfig
from support.float8_models import BY_BLOCKS, BY_OUTPUTS, FLOAT8, save_float8
from support.packed_models import Packing, pack_model
from support.torch_models import copy_with, logits_after, random_prompts, runner_of

MakeModel = Callable[..., Path]
PACKINGS = {
    "gptq": Packing(),
    "gptq asymmetric, by act-order": Packing(symmetric=False, act_order=True),
    "gptq by rows": Packing(group_size=-1),
    "gptq v2, asymmetric": Packing(group_size=64, symmetric=False, v2=True),
    "gptq of 8 bits, output layer too": Packing(bits=8, symmetric=False, act_order=True, skip=()),
    "awq": Packing(method="awq", symmetric=False),
    "awq, o_proj as it was": Packing(method="awq", group_size=64, symmetric=False, skip=("lm_head", "o_proj")),
}
by_packing = pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS.keys())
Q = "model.layers.1.self_attn.q_proj"
IDS = torch.arange(1, 20)[None]


def load(path: Path, dtype: str = "float32") -> nn.Module:
    return load_model(ModelDir.open(path), dtype, torch.device("cpu"))


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    out: Tensor = model(IDS, use_cache=False).logits[0].float()
    return out


def truth(path: Path, dequantised: dict[str, Tensor]) -> Tensor:
    """By transformers, in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.load_state_dict(dequantised, strict=False)
    return logits(model)


def changed(path: Path, to: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    path = copy_with(path, to)
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@by_packing
def test_on_a_cpu_it_is_what_it_stands_for(make_model: MakeModel, tmp_path: Path, packing: Packing) -> None:
    path = make_model("qwen2")
    expected = truth(path, pack_model(path, tmp_path / "packed", packing))
    assert torch.allclose(logits(load(tmp_path / "packed")), expected, atol=1e-4)
    assert not torch.allclose(truth(path, {}), expected, atol=1e-2), "the packed weights are others than the saved ones"


def test_a_runner_serves_it_in_bfloat16(make_model: MakeModel, tmp_path: Path) -> None:
    path = make_model("qwen2", dtype="bfloat16")
    dequantised = pack_model(path, tmp_path / "packed", PACKINGS["awq"])
    (prompt,) = random_prompts(20, seed=4)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.load_state_dict(dequantised, strict=False)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    got = logits_after(runner_of(tmp_path / "packed", "bfloat16", backend="sdpa"), prompt).float()
    assert (got - expected).norm() < 0.03 * expected.norm()


def test_zero_points_below_zero_borrow_of_the_next() -> None:
    """Format 1 takes one off a word; so what is added is to the word."""
    zeros = torch.tensor([[0, 3, 0, 0, 15, 8, 0, 7]])
    word = sum(int(zero) << 4 * place for place, zero in enumerate(zeros[0])) - 0x11111111
    parts = {
        "qweight": torch.zeros(4, 8, dtype=torch.int32),
        "qzeros": torch.tensor([[(word + 2**31) % 2**32 - 2**31]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    layer = packed.layer_of(parts, packed.PackedScheme("gptq", 4, 32, zeros_less_one=True), torch.float32)
    assert layer(torch.eye(32))[0].tolist() == (-zeros[0]).tolist()


def test_dequantised_is_the_reference(make_model: MakeModel, tmp_path: Path) -> None:
    pack_model(make_model("llama"), tmp_path / "packed", PACKINGS["gptq asymmetric, by act-order"])
    scheme = packed.PackedScheme("gptq", 4, 32, zeros_less_one=True)
    files = packed.PackedFiles(tmp_path / "packed", scheme)
    layer = packed.layer_of(files.read(files.layers[0]), scheme, torch.float32)
    assert isinstance(layer, QuantisedLinear)
    assert layer.zeros is not None
    assert layer.order is not None
    x = torch.randn(3, layer.in_features)
    assert torch.allclose(layer(x), layer.dequantised()(x), atol=1e-5)


# --------------------------------------------------------------------------------------------------------- float8


@pytest.mark.parametrize("settings", [BY_BLOCKS, BY_OUTPUTS], ids=["by blocks", "by outputs"])
def test_float8_on_a_cpu_is_what_it_stands_for(make_model: MakeModel, tmp_path: Path, settings: dict[str, Any]) -> None:
    path = make_model("qwen2")
    expected = truth(path, save_float8(path, tmp_path / "float8", settings))
    assert torch.allclose(logits(load(tmp_path / "float8")), expected, atol=1e-4)
    assert not torch.allclose(truth(path, {}), expected, atol=1e-2)


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        (BY_BLOCKS, {"activation_scheme": "static"}),
        (BY_BLOCKS, {"weight_block_size": None}),
        (BY_BLOCKS, {"expert_dtype": "fp4"}),
        (BY_OUTPUTS, {"format": "pack-quantized"}),
        (BY_OUTPUTS, {"kv_cache_scheme": {"num_bits": 8}}),
        (BY_OUTPUTS, {"config_groups": {"group_0": {"weights": FLOAT8 | {"strategy": "tensor"}}}}),
    ],
)
def test_other_float8_is_left_to_transformers(settings: dict[str, Any], change: dict[str, Any]) -> None:
    """Which has it, or says what package it lacks."""
    assert packed.packed_scheme(settings) is not None
    assert packed.packed_scheme(settings | change) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda it: it.update({f"{Q}.weight": it[f"{Q}.weight"].float()}), "dtypes are torch.float32"),
        (lambda it: it.update({f"{Q}.weight_scale_inv": torch.ones(1, 2)}), "do not match blocks of 32 outputs and 32"),
    ],
)
def test_files_that_do_not_hold_float8(make_model: MakeModel, tmp_path: Path, change: Any, why: str) -> None:
    save_float8(make_model("llama"), tmp_path / "float8", BY_BLOCKS)
    with pytest.raises(ModelRefused, match=why):
        load(changed(tmp_path / "float8", tmp_path / "changed", change))


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"bits": 3}, "by gptq with bits 3; only 4 and 8"),
        ({"group_size": 0}, "group_size 0"),
        ({"checkpoint_format": "marlin"}, "in the format marlin; only gptq and gptq_v2"),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, "differ: gptq, gptq_v2"),
        ({"dynamic": {"-:.*o_proj": {}}}, "with dynamic"),
        ({"rotation": "hadamard"}, "with rotation 'hadamard'"),
        ({"pack_dtype": "int8"}, "with pack_dtype 'int8'"),
        ({"is_marlin_format": True}, "with is_marlin_format True"),
        ({"quant_method": "awq", "bits": 8}, "by awq with bits 8; only 4"),
        ({"quant_method": "awq", "version": "gemv"}, "in the format gemv; only gemm"),
        ({"group_size": 64}, "do not match groups of 64 of 128 inputs, and 64 outputs"),
        ({"bits": 8}, "do not match groups of 32 of 64 inputs, and 64 outputs"),
    ],
)
def test_what_is_not_understood(make_model: MakeModel, tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    pack_model(make_model("llama"), tmp_path / "packed", Packing())
    own = Packing().config
    if "checkpoint_format" not in settings:
        del own["checkpoint_format"]
    path = copy_with(tmp_path / "packed", tmp_path / "changed", quantization_config=own | settings)
    with pytest.raises(ModelRefused, match=why):
        load(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda it: it.pop(f"{Q}.scales"), f"weights of {Q} cannot be read: scales is missing"),
        (lambda it: it.update({f"{Q}.qweight": it[f"{Q}.qweight"].float()}), "dtypes are torch.float32"),
        (lambda it: it.update({f"{Q}.g_idx": it[f"{Q}.g_idx"] * 0}), "g_idx does not put 64 inputs into 2 groups"),
        (lambda it: it.pop(f"{Q}.qweight"), rf"lack 1 of its weights, {Q}\.weight"),
        (lambda it: it.update({"model.layers.1.mlp.experts.0.w1.qweight": torch.zeros(1)}), "which is not a module"),
        (lambda it: it.update({"model.embed_tokens.qweight": torch.zeros(1)}), "a Embedding, not a linear layer"),
    ],
)
def test_files_that_do_not_hold_it(make_model: MakeModel, tmp_path: Path, change: Any, why: str) -> None:
    pack_model(make_model("llama"), tmp_path / "packed", Packing())
    with pytest.raises(ModelRefused, match=why):
        load(changed(tmp_path / "packed", tmp_path / "changed", change))


def test_a_layer_of_another_shape(make_model: MakeModel, tmp_path: Path) -> None:
    pack_model(make_model("llama"), tmp_path / "packed", Packing())
    path = copy_with(tmp_path / "packed", tmp_path / "changed", intermediate_size=64)
    with pytest.raises(ModelRefused, match=r"mlp\.down_proj are 64 x 128, not 64 x 64"):
        load(path)


@pytest.mark.parametrize(
    ("quantization", "why"),
    [
        (QuantizationConfig(weights="int8"), "weights: only auto is possible: the model's files are already quantised"),
        (QuantizationConfig(lora=Path("/adapter")), "lora: the model's files are already quantised"),
    ],
)
def test_not_together(make_model: MakeModel, tmp_path: Path, quantization: QuantizationConfig, why: str) -> None:
    pack_model(make_model("llama"), tmp_path / "packed", Packing())
    with pytest.raises(EngineStartError, match=why):
        load_model(ModelDir.open(tmp_path / "packed"), "auto", torch.device("cpu"), quantization)


def test_on_a_gpu_vllm_serves_it(make_model: MakeModel, tmp_path: Path) -> None:
    """Refused by config.json, before anything is moved to the device."""
    pack_model(make_model("llama"), tmp_path / "packed", Packing())
    with pytest.raises(EngineStartError, match=r"model: .* quantised, by gptq, .* CPUs only: set engine: vllm"):
        load_model(ModelDir.open(tmp_path / "packed"), "auto", torch.device("cuda"))


def test_it_is_not_cut(make_model: MakeModel, tmp_path: Path) -> None:
    pack_model(make_model("llama"), tmp_path / "packed", Packing())
    with pytest.raises(ModelRefused, match="its weights are quantised and cannot be split: tensor_parallel must be 1"):
        refuse_by_plan(AutoConfig.from_pretrained(tmp_path / "packed"), 2)


def test_a_packed_model_guesses_for_one_as_saved(make_model: MakeModel, tmp_path: Path) -> None:
    path = make_model("llama")
    pack_model(path, tmp_path / "packed", Packing())
    runner = runner_of(path, draft=tmp_path / "packed")
    assert runner._draft is not None
    with pytest.raises(EngineStartError, match=r"speculation: .* is not a draft model: only auto is possible"):
        runner_of(path, draft=tmp_path / "packed", quantization=QuantizationConfig(weights="int8"))


def test_its_kv_may_be_int8(make_model: MakeModel, tmp_path: Path) -> None:
    pack_model(make_model("llama"), tmp_path / "packed", PACKINGS["awq"])
    (prompt,) = random_prompts(40, seed=4)
    plain, quantised = (
        logits_after(runner_of(tmp_path / "packed", quantization=QuantizationConfig(kv_dtype=kind)), prompt)
        for kind in ("auto", "int8")
    )
    assert 0 < (plain - quantised).norm() < 0.05 * plain.norm()
