"""What the torch engine refuses, at load and with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.backends.torch.runner import TorchRunner
from engine.errors import EngineStartError, ModelRefused

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
DENSE: dict[str, Any] = SMALL | {
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def load(path: Path) -> TorchRunner:
    return TorchRunner(path, "float32", block_tokens=16, kv_bytes=1 << 20)


def with_rope(config: Any, **rope: Any) -> Any:
    config.rope_parameters = {"rope_theta": 10000.0} | rope
    return config


BLOOM = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2, "seq_length": 64}
SINKS = DENSE | {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
LATENT: dict[str, Any] = DENSE | {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
BART = {"vocab_size": 64, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}
MOSHI = {name: value for name, value in DENSE.items() if name != "intermediate_size"} | {"ffn_dim": 64}

MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "state space": (lambda: tf.MambaConfig(**SMALL, state_size=4, conv_kernel=2), "linear_attention"),
    "attention beside the interface": (lambda: tf.BloomConfig(**BLOOM), "0 of its 2 layers"),
    "attention sinks": (lambda: with_rope(tf.GptOssConfig(**SINKS), rope_type="default"), "s_aux"),
    "keys and values of unequal size": (lambda: tf.DeepseekV3Config(**LATENT), "keys have"),
    # its positions are those within the batch, whatever it is told
    "half of an encoder-decoder": (lambda: tf.BartConfig(**BART), "neither causal nor causal within a window"),
    "a mask of its own": (lambda: tf.DogeConfig(**DENSE), "a mask of its own"),
    "a window of the mask": (
        lambda: tf.PhimoeConfig(**DENSE, num_local_experts=2, sliding_window=24),
        "its attention mask has a window of 24, its layer a window of None",
    ),
    "a window of the cache": (
        lambda: tf.MoshiConfig(**MOSHI, sliding_window=24),
        "a window of 24, which it does not pass to the attention function",
    ),
    "rope of the batch": (lambda: with_rope(tf.LlamaConfig(**DENSE), rope_type="dynamic", factor=2.0), "dynamic RoPE"),
}


@pytest.mark.parametrize(("config", "said"), MODELS.values(), ids=MODELS)
def test_models_whose_layers_it_cannot_serve(tmp_path: Path, config: Callable[[], Any], said: str) -> None:
    tf.AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=said):
        load(tmp_path)


LINEAR = {"layer_types": ["linear_attention", "full_attention"], "model_type": "qwen3_next"}
QUANTISED = r"its weights are quantised, by .*: set engine: vllm"
CODE = {"auto_map": {"AutoConfig": "strange.Strange", "AutoModelForCausalLM": "a.B"}}


@pytest.mark.parametrize(
    ("config", "changed", "said"),
    [
        (tf.T5Config(vocab_size=64, d_model=32, num_layers=1, num_heads=2), {}, "encoder-decoder"),
        (tf.ViTConfig(), {}, "not a causal language model"),
        (None, {"model_type": "telepathy"}, "unsupported architecture"),
        (None, {"model_type": "telepathy"} | CODE, "needs Python code from its directory"),  # unasked and not run
        (tf.Qwen3Config(**DENSE, head_dim=16), LINEAR, "linear_attention"),
        (tf.Qwen2Config(**DENSE), {"quantization_config": {"quant_method": "gptq", "bits": 4}}, QUANTISED),
        (tf.Qwen2Config(**DENSE), {"quantization_config": {"quant_method": "strange"}}, QUANTISED),
        (tf.Qwen2Config(**DENSE), {"quantization_config": {"bits": 4}}, QUANTISED),
        (tf.LlamaConfig(**DENSE), {}, "cannot load"),  # it has no weights
    ],
)
def test_directories_that_it_cannot_load(tmp_path: Path, config: Any, changed: dict[str, Any], said: str) -> None:
    if config is not None:
        config.save_pretrained(tmp_path)
        changed = json.loads((tmp_path / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(changed))
    (tmp_path / "strange.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(ModelRefused, match=said):
        load(tmp_path)


def after_the_one_before(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, dims=1)


def by_place_in_the_batch(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
    return LlamaRotaryEmbedding.forward(self, x, torch.arange(x.shape[1])[None])


@pytest.mark.parametrize(
    ("part", "computes"), [("LlamaMLP", after_the_one_before), ("LlamaRotaryEmbedding", by_place_in_the_batch)]
)
def test_tokens_that_depend_on_others_by_more_than_attention(
    make_model: Any, monkeypatch: pytest.MonkeyPatch, part: str, computes: Any
) -> None:
    changed = type(f"Other{part}", (getattr(modeling_llama, part),), {"forward": computes})
    monkeypatch.setattr(modeling_llama, part, changed)
    with pytest.raises(ModelRefused, match="depends on other tokens outside attention, or on its place"):
        load(make_model("llama"))


def test_models_that_cannot_be_run(tmp_path: Path, make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("sizes do not match")

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", broken)
    with pytest.raises(ModelRefused, match="a forward pass of 2 tokens failed: sizes do not match"):
        load(make_model("llama"))


def test_a_pool_too_small_for_one_block(tiny_model: Path) -> None:
    with pytest.raises(EngineStartError, match="kv_memory_mib"):
        TorchRunner(tiny_model, "float32", block_tokens=16, kv_bytes=100)


def test_other_weights_have_another_fingerprint(make_model) -> None:  # type: ignore[no-untyped-def]
    one, same, other = (load(make_model("llama", seed=seed)) for seed in (0, 0, 1))
    assert one.info.weights_fingerprint == same.info.weights_fingerprint
    assert one.info.weights_fingerprint != other.info.weights_fingerprint
    assert one.layout == other.layout
