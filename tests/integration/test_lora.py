"""LoRA adapters, as PEFT saves them, merged at load."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.backends.torch.loading.loader import load_model
from engine.backends.torch.loading.quantised import QuantisedLinear, quantise
from engine.errors import EngineStartError
from engine.model.model_dir import ModelDir
from engine.model.quantization import AS_SAVED, QuantizationConfig
from support.adapters import ALPHA, RANK, adapter_weights, write_adapter

CPU = torch.device("cpu")
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"
SIZES = {Q: (64, 64), DOWN: (64, 128)}


def weights_of(seed: int = 0) -> dict[str, Tensor]:
    return adapter_weights(SIZES, seed)


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    """adapter(weights, **changes to its config) -> its directory."""

    def write(weights: dict[str, Tensor] | None = None, **changes: Any) -> Path:
        return write_adapter(tmp_path / "adapter", weights_of() if weights is None else weights, **changes)

    return write


def load(path: Path, quantization: QuantizationConfig) -> torch.nn.Module:
    return load_model(ModelDir.open(path), "auto", CPU, quantization)


@pytest.mark.parametrize(("stabilised", "scale"), [(False, ALPHA / RANK), (True, ALPHA / math.sqrt(RANK))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_what_the_formula_says_and_nothing_else_changes(
    make_model: Any, adapter: Callable[..., Path], dtype: str, stabilised: bool, scale: float
) -> None:
    path = make_model("llama", dtype=dtype)
    saved, lora = load_file(path / "model.safetensors"), weights_of()
    merged = load(path, QuantizationConfig(lora=adapter(use_rslora=stabilised))).state_dict()
    for name in SIZES:
        a, b = (lora[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
        exact = saved.pop(f"{name}.weight").double() + scale * (b @ a)
        assert torch.allclose(merged[f"{name}.weight"].double(), exact, rtol=2**-8 if dtype == "bfloat16" else 1e-5)
    assert all(torch.equal(merged[name], tensor) for name, tensor in saved.items())


def test_it_is_merged_before_weights_are_quantised(make_model: Any, adapter: Callable[..., Path]) -> None:
    path, lora = make_model("llama", dtype="bfloat16"), adapter()
    layer = load(path, QuantizationConfig(weights="int8", lora=lora)).get_submodule(Q)
    assert isinstance(layer, QuantisedLinear)
    values, scales = quantise(load(path, QuantizationConfig(lora=lora)).get_submodule(Q).weight.data)  # type: ignore[union-attr,arg-type]
    assert torch.equal(layer.values, values)
    assert torch.equal(layer.scales, scales)


def test_adapters_have_fingerprints(adapter: Callable[..., Path]) -> None:
    saved = bytes(32)
    prints = {AS_SAVED.fingerprint(saved)}
    for weights, changes in ((None, {}), (weights_of(1), {}), (None, {"lora_alpha": 11})):
        lora = adapter(weights, **changes)
        prints |= {
            QuantizationConfig(lora=lora).fingerprint(saved),
            QuantizationConfig(weights="int8", lora=lora).fingerprint(saved),
        }
        assert QuantizationConfig(lora=lora).fingerprint(saved) in prints
    assert len(prints) == 7
    with pytest.raises(EngineStartError, match=r"lora: .*not a PEFT adapter"):
        QuantizationConfig(lora=Path("/nowhere")).fingerprint(saved)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"peft_type": "IA3"}, "not of peft_type LORA"),
        ({"use_dora": True}, "settings that are not supported: use_dora"),
        ({"modules_to_save": ["lm_head"], "lora_bias": True}, "not supported: lora_bias, modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "not supported: rank_pattern"),
        ({"something_new": 1}, "not supported: something_new"),
        ({"bias": "all"}, "the adapter's bias 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the model's own weights"),
        ({"r": 0}, "the adapter's r is 0"),
        ({"r": 8}, r"q_proj.lora_A is \[4, 64\], not \[8, 64\]|down_proj.lora_A is \[4, 128\], not \[8, 128\]"),
        ({"lora_alpha": "much"}, "the adapter's lora_alpha is 'much'"),
        ({"target_modules": ["q_proj", "down_proj", "v_proj"]}, "target_modules name v_proj, but it has no weights"),
    ],
)
def test_what_its_config_asks_for_and_cannot_have(
    tiny_model: Path, adapter: Callable[..., Path], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(EngineStartError, match=f"lora: .*({why})"):
        load(tiny_model, QuantizationConfig(lora=adapter(**changes)))


def renamed(old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): tensor for name, tensor in weights_of().items()}


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        (
            renamed("layers.1", "layers.7"),
            r"a module model\.layers\.7\.self_attn\.q_proj, which the model does not have",
        ),
        (renamed("self_attn.q_proj", "input_layernorm"), "a LlamaRMSNorm: only plain linear layers"),
        (renamed("q_proj.lora_A.weight", "q_proj.lora_magnitude_vector"), "is not a weight of plain LoRA"),
        (renamed("q_proj.lora_A", "k_proj.lora_A"), "q_proj has no lora_A|k_proj has no lora_B"),
        (renamed(Q, "model.layers.1.self_attn.k_proj"), r"k_proj.lora_B is \[64, 4\], not \[32, 4\]"),
        (
            {name: tensor.to(torch.int32) for name, tensor in weights_of().items()},
            "dtype torch.int32, not floating-point",
        ),
        ({}, "is empty"),
    ],
)
def test_weights_that_do_not_fit(
    tiny_model: Path, adapter: Callable[..., Path], weights: dict[str, Tensor], why: str
) -> None:
    with pytest.raises(EngineStartError, match=f"lora: .*({why})"):
        load(tiny_model, QuantizationConfig(lora=adapter(weights, target_modules=None)))


def test_a_matrix_that_is_the_embedding_too(make_model: Any, adapter: Callable[..., Path]) -> None:
    weights = {f"base_model.model.lm_head.lora_{side}.weight": torch.ones(4, 64) for side in "AB"}
    with pytest.raises(EngineStartError, match=r"lora: .*lm_head, which shares its matrix with the embedding"):
        load(make_model("gemma2"), QuantizationConfig(lora=adapter(weights, target_modules=["lm_head"])))


def test_no_adapter_at_all(tiny_model: Path, adapter: Callable[..., Path]) -> None:
    path = adapter()
    (path / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(EngineStartError, match=r"lora: .*adapter_model\.safetensors cannot be read"):
        load(tiny_model, QuantizationConfig(lora=path))
    (path / "adapter_config.json").unlink()
    with pytest.raises(EngineStartError, match=r"lora: .*is not a PEFT adapter"):
        load(tiny_model, QuantizationConfig(lora=path))
