"""What of a model decides how long its steps take: numbers of parameters, and KV per token."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelRefused
from engine.model_dir import ModelDir
from simulator.errors import BadSetup

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}
DEFAULT_CONFIG: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
"""Of Llama 3.1 8B, for who names no model."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer of equal layers."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    params: int
    """All of them."""
    active_params: int
    """That a token is multiplied with: of a mixture of experts, those it is sent to."""
    expert_params: int = 0
    """Of all routed experts, in all layers."""
    experts: int = 0
    experts_per_token: int = 0

    @property
    def weight_bytes(self) -> int:
        return self.params * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def attention_flops_per_pair(self) -> int:
        """Of a token and one before it: a product with its key, and one with its value."""
        return 4 * self.layers * self.heads * self.head_dim

    def weight_bytes_read(self, num_tokens: int) -> float:
        """By a step of so many tokens: of experts, those that somebody is sent to, were they sent by chance."""
        if not self.experts:
            return float(self.weight_bytes)
        missed = (1 - self.experts_per_token / self.experts) ** num_tokens
        return self.dtype_bytes * (self.params - self.expert_params * missed)


def open_shape(path: Path | None) -> ModelShape:
    """Of a model directory; None: Llama 3.1 8B. Raises BadSetup."""
    if path is None:
        return shape_of("Llama 3.1 8B", DEFAULT_CONFIG)
    try:
        model_dir = ModelDir.open(path)
    except ModelRefused as error:
        raise BadSetup("model", str(error)) from None
    config = model_dir.config
    nested = config.get("text_config")
    return shape_of(model_dir.name, nested if isinstance(nested, dict) else config)


def shape_of(name: str, config: dict[str, Any]) -> ModelShape:
    """Of a config.json. Raises BadSetup naming what it lacks."""
    hidden, layers = _number(config, "hidden_size", "n_embd"), _number(config, "num_hidden_layers", "n_layer")
    heads = _number(config, "num_attention_heads", "n_head")
    kv_heads = _number(config, "num_key_value_heads", default=heads)
    head_dim = _number(config, "head_dim", default=hidden // heads)
    inner = _number(config, "intermediate_size", "n_inner", default=4 * hidden)
    experts = _number(config, "num_local_experts", "num_experts", "n_routed_experts", default=0)
    per_token = _number(config, "num_experts_per_tok", default=0)
    dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if dtype not in _DTYPE_BYTES:
        raise BadSetup("model", f"config.json: torch_dtype {dtype!r} is none of {', '.join(_DTYPE_BYTES)}")
    if bool(experts) != bool(per_token) or per_token > experts:
        raise BadSetup("model", f"config.json: {experts} experts, of which a token is sent to {per_token}")
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    dense = 0 if experts else 3 * hidden * inner
    expert = 3 * hidden * _number(config, "moe_intermediate_size", default=inner) if experts else 0
    vocabulary = _number(config, "vocab_size") * hidden
    embeddings = vocabulary if config.get("tie_word_embeddings") else 2 * vocabulary
    common = layers * (attention + dense)
    return ModelShape(
        name=name,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype_bytes=_DTYPE_BYTES[dtype],
        params=common + layers * experts * expert + embeddings,
        active_params=common + layers * per_token * expert,
        expert_params=layers * experts * expert,
        experts=experts,
        experts_per_token=per_token,
    )


def _number(config: dict[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        if (value := config.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (default is None and value < 1):
                raise BadSetup("model", f"config.json: {name} is {value!r}")
            return value
    if default is None:
        raise BadSetup("model", f"config.json does not say {names[0]}")
    return default
