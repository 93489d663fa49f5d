"""Shapes of published models by name, for whoever has no directory of the model at hand.

The figures are those of each repository's config.json. A name is that of the repository or of its files' directory;
`-instruct` at its end changes no shape, and `-fp8` says that the layers are saved in float8.
"""

from typing import Any

from simulator.model_shape import DEFAULT_CONFIG, ModelShape, shape_of

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
}
NAMES = tuple(_CONFIGS)


def known_shape(name: str) -> ModelShape | None:
    """Return the shape of a model by its name, or by that of its repository; None: not known."""
    short = name.rpartition("/")[2].lower().removeprefix("meta-")
    plain = short.removesuffix("-fp8")
    config = _CONFIGS.get(plain.removesuffix("-instruct"))
    if config is None:
        return None
    return shape_of(name, config if plain == short else config | {"quantization_config": {"quant_method": "fp8"}})
