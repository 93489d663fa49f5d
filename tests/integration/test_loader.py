"""What the torch engine refuses, at load and with the reason."""

import json
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


def save(config: Any, path: Path) -> Path:
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_encoder_decoders(tmp_path: Path) -> None:
    tf.T5Config(vocab_size=64, d_model=32, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="encoder-decoder"):
        load(tmp_path)


def test_models_that_generate_nothing(tmp_path: Path) -> None:
    tf.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="not a causal language model"):
        load(tmp_path)


def test_unknown_architectures(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "telepathy"}))
    with pytest.raises(ModelRefused, match="unsupported architecture"):
        load(tmp_path)


def test_code_in_a_model_directory(tmp_path: Path) -> None:
    """Nobody is asked whether it shall be run, either."""
    config = {"model_type": "telepathy", "auto_map": {"AutoConfig": "strange.Strange", "AutoModelForCausalLM": "a.B"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "strange.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(ModelRefused, match="needs Python code from its directory"):
        load(tmp_path)


def test_state_space_models(tmp_path: Path) -> None:
    save(tf.MambaConfig(**SMALL, state_size=4, conv_kernel=2), tmp_path)
    with pytest.raises(ModelRefused, match="linear_attention"):
        load(tmp_path)


def test_attention_that_does_not_go_through_the_interface(tmp_path: Path) -> None:
    save(tf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2, seq_length=64), tmp_path)
    with pytest.raises(ModelRefused, match="0 of its 2 layers"):
        load(tmp_path)


def test_linear_attention_layers(tmp_path: Path) -> None:
    config = tf.Qwen3Config(**DENSE, head_dim=16)
    config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["layer_types"] = ["linear_attention", "full_attention"]
    values["model_type"] = "qwen3_next"
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelRefused, match="linear_attention"):
        load(tmp_path)


@pytest.mark.parametrize("saved", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "strange"}, {"bits": 4}])
def test_models_saved_quantised(tmp_path: Path, saved: dict[str, Any]) -> None:
    tf.Qwen2Config(**DENSE).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": saved}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelRefused, match=r"its weights are quantised, by .*: set engine: vllm"):
        load(tmp_path)


def test_attention_sinks(tmp_path: Path) -> None:
    config = tf.GptOssConfig(**DENSE, head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    save(config, tmp_path)
    with pytest.raises(ModelRefused, match="s_aux"):
        load(tmp_path)


def test_keys_and_values_of_unequal_size(tmp_path: Path) -> None:
    config = tf.DeepseekV3Config(
        **DENSE,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        n_shared_experts=1,
        first_k_dense_replace=1,
    )
    save(config, tmp_path)
    with pytest.raises(ModelRefused, match="keys have"):
        load(tmp_path)


def test_the_decoder_half_of_an_encoder_decoder(tmp_path: Path) -> None:
    """Its positions are those within the batch, whatever it is told."""
    config = tf.BartConfig(vocab_size=64, d_model=32, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=64)
    save(config, tmp_path)
    with pytest.raises(ModelRefused, match="neither causal nor causal within a window"):
        load(tmp_path)


def test_masks_of_the_model_s_own(tmp_path: Path) -> None:
    save(tf.DogeConfig(**DENSE), tmp_path)
    with pytest.raises(ModelRefused, match="a mask of its own"):
        load(tmp_path)


def test_a_window_that_only_the_mask_has(tmp_path: Path) -> None:
    save(tf.PhimoeConfig(**DENSE, num_local_experts=2, sliding_window=24), tmp_path)
    with pytest.raises(ModelRefused, match="its attention mask has a window of 24, its layer a window of None"):
        load(tmp_path)


def test_a_window_that_only_a_cache_has(tmp_path: Path) -> None:
    sizes = {name: value for name, value in DENSE.items() if name != "intermediate_size"}
    save(tf.MoshiConfig(**sizes, ffn_dim=64, sliding_window=24), tmp_path)
    with pytest.raises(ModelRefused, match="a window of 24, which it does not pass to the attention function"):
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


def test_rope_that_depends_on_the_batch(tmp_path: Path) -> None:
    config = tf.LlamaConfig(**DENSE)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    save(config, tmp_path)
    with pytest.raises(ModelRefused, match="dynamic RoPE"):
        load(tmp_path)


def test_missing_weights(tmp_path: Path) -> None:
    tf.LlamaConfig(**DENSE).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="cannot load"):
        load(tmp_path)


def test_a_pool_too_small_for_one_block(tiny_model: Path) -> None:
    with pytest.raises(EngineStartError, match="kv_memory_mib"):
        TorchRunner(tiny_model, "float32", block_tokens=16, kv_bytes=100)


def test_other_weights_have_another_fingerprint(make_model) -> None:  # type: ignore[no-untyped-def]
    one, same, other = (load(make_model("llama", seed=seed)) for seed in (0, 0, 1))
    assert one.info.weights_fingerprint == same.info.weights_fingerprint
    assert one.info.weights_fingerprint != other.info.weights_fingerprint
    assert one.layout == other.layout
