"""Shapes of published models by name, for whoever has no directory of the model at hand.

The figures are those of each repository's config.json, of its text model where it has others. A name is that of the
repository or of its files' directory. `-instruct`, `-it` and `-thinking` at its end change no shape, and `-fp8` says
that the layers are saved in float8.
"""

from pathlib import Path
from typing import Any

from sizing.models.model_shape import DEFAULT_CONFIG, ModelShape, open_shape, shape_of

_LLAMA = DEFAULT_CONFIG | {"max_position_embeddings": 131072}
_LLAMA_70B = _LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_QWEN3 = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
_GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"},
}
_QWEN3_NEXT_80B = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
}
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8"},
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA,
    "llama-3.1-70b": _LLAMA_70B,
    "llama-3.3-70b": _LLAMA_70B,
    "llama-3.1-405b": _LLAMA
    | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
    "qwen3-8b": _QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-14b": _QWEN3
    | {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
    "qwen3-32b": _QWEN3
    | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "mistral-7b-v0.3": _LLAMA | {"vocab_size": 32768, "max_position_embeddings": 32768},
    "mixtral-8x7b-v0.1": _LLAMA
    | {"vocab_size": 32000, "max_position_embeddings": 32768, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt-oss-120b": _GPT_OSS_120B,
    "gemma-3-27b": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "qwen3-next-80b-a3b": _QWEN3_NEXT_80B,
    "qwen3.5-35b-a3b": _QWEN3_NEXT_80B
    | {
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "vocab_size": 248320,
    },
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
}
NAMES = tuple(_CONFIGS)


_SUFFIXES = ("-instruct", "-it", "-thinking")


def known_shape(name: str) -> ModelShape | None:
    """Return the shape of a model by its name, or by that of its repository; None: not known."""
    short = name.rpartition("/")[2].lower().removeprefix("meta-")
    plain = short.removesuffix("-fp8")
    ending = next((each for each in _SUFFIXES if plain.endswith(each)), "")
    config = _CONFIGS.get(plain.removesuffix(ending))
    if config is None:
        return None
    return shape_of(name, config if plain == short else config | {"quantization_config": {"quant_method": "fp8"}})


def named_shape(model: Path | None) -> ModelShape:
    """Return the shape of a directory, of a known name, or else of a repository; None: Llama 3.1 8B.

    Raises BadSetup.
    """
    known = None if model is None or model.exists() else known_shape(str(model))
    return known or open_shape(model)
