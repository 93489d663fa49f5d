"""Properties of a model that decide the duration of its steps: numbers of parameters, and KV per token."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelRefused
from engine.kv.layout import DTYPE_BYTES
from engine.model.hub import CONFIG_FILES, fetch
from engine.model.model_dir import ModelDir
from simulator.errors import BadSetup, shown

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}
MOST = 1 << 30
"""Largest accepted number in a config."""
DEFAULT_CONFIG: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
"""Config of Llama 3.1 8B, used when no model is named."""
_TWO_MATRICES = frozenset(
    ("opt", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "codegen", "bloom", "falcon", "phi", "starcoder2", "nemotron")
)
"""Model types whose MLP has no gate, so two matrices instead of three."""
_TIED = frozenset(
    ("opt", "gpt2", "gpt_bigcode", "bloom", "falcon", "starcoder2", "cohere", "cohere2", "gemma", "gemma2", "gemma3")
) | {"gemma3_text", "gemma3n", "gemma3n_text"}
"""Model types whose output layer is their embeddings by default."""
_TOP = ("quantization_config", "tie_word_embeddings", "torch_dtype", "dtype", "model_type")
"""Keys that a config with a `text_config` may have beside it."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer of equal layers."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    """Bytes of an unquantised weight, and of embeddings."""
    params: int
    """Number of all parameters."""
    active_params: int
    """Parameters that multiply a token; with experts, those of the experts it is routed to."""
    expert_params: int = 0
    """Parameters of all routed experts in all layers."""
    experts: int = 0
    experts_per_token: int = 0
    embedding_params: int = 0
    """Parameters of embeddings and output layer."""
    layer_bits: int | None = None
    """Bits of a quantised layer's weight, without scales; None: `dtype_bytes`."""
    max_context_tokens: int | None = None
    """Context length; None: unknown."""
    hidden: int = 0
    """Width of a hidden state."""
    inner: int = 0
    """Width of the MLP's inside for a token; with experts, of all those it is routed to."""
    vocab: int = 0
    """Size of the vocabulary."""

    @property
    def weight_bytes(self) -> int:
        layers = self.params - self.embedding_params
        return round(self.embedding_params * self.dtype_bytes + layers * self._layer_bytes)

    @property
    def weights_in_words(self) -> str:
        """Sizes of the weights by type, for display."""
        if self.layer_bits is None:
            return f"{self.params / 1e9:.2f} G parameters x {self.dtype_bytes} B"
        layers, rest = (self.params - self.embedding_params) / 1e9, self.embedding_params / 1e9
        return f"{layers:.2f} G parameters x {self._layer_bytes:g} B + {rest:.2f} G x {self.dtype_bytes} B"

    @property
    def kv_dtype(self) -> str:
        """Data type of stored and moved KV; models with narrower weights compute KV in 16 bits too."""
        return "float32" if self.dtype_bytes == 4 else "bfloat16"

    @property
    def kv_dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.kv_dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_dtype_bytes

    @property
    def _layer_bytes(self) -> float:
        """Bytes of a weight in a layer."""
        return self.dtype_bytes if self.layer_bits is None else self.layer_bits / 8

    @property
    def attention_flops_per_pair(self) -> int:
        """FLOP of attention per pair of a token and one before it: a product with its key, and one with its value."""
        return 4 * self.layers * self.heads * self.head_dim

    def weight_bytes_read(self, num_tokens: int) -> float:
        """Return the weight bytes that a step of so many tokens reads, with experts chosen at random."""
        if not self.experts:
            return float(self.weight_bytes)
        missed = (1 - self.experts_per_token / self.experts) ** num_tokens
        return self.weight_bytes - self._layer_bytes * self.expert_params * missed


def open_shape(path: Path | None) -> ModelShape:
    """Return the shape of a model directory or repository; None: Llama 3.1 8B.

    Raises BadSetup.
    """
    if path is None:
        return shape_of("Llama 3.1 8B", DEFAULT_CONFIG)
    return shape_in(open_config(path))


def open_config(path: Path) -> ModelDir:
    """Return a model directory, or the fetched configs of a repository.

    Raises BadSetup.
    """
    try:
        return ModelDir.open(fetch(path, CONFIG_FILES))
    except ModelRefused as error:
        raise BadSetup("model", error.reason) from None


def shape_in(model_dir: ModelDir) -> ModelShape:
    """Return the shape of a model directory.

    Raises BadSetup where it is not known.
    """
    config = model_dir.config
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config = {name: config[name] for name in _TOP if name in config} | nested
    return shape_of(model_dir.name, config)


def shape_of(name: str, config: dict[str, Any]) -> ModelShape:
    """Return the shape of a config.json.

    Raises BadSetup naming a missing key.
    """
    if config.get("kv_lora_rank"):
        raise BadSetup("model", "config.json: kv_lora_rank: latent attention (MLA) is not known to the simulator")
    kind = str(config.get("model_type") or "")
    hidden, layers = _number(config, "hidden_size", "n_embd"), _number(config, "num_hidden_layers", "n_layer")
    heads = _number(config, "num_attention_heads", "n_head")
    if heads > hidden:
        raise BadSetup("model", f"config.json: {heads} attention heads are more than the hidden size, {hidden}")
    kv_heads = _number(config, "num_key_value_heads", default=_default_kv_heads(config, kind, heads))
    head_dim = _number(config, "head_dim", default=hidden // heads)
    inner = _number(config, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", default=4 * hidden)
    experts = _number(config, "num_local_experts", "num_experts", "n_routed_experts", default=0, least=0)
    per_token = _number(config, "num_experts_per_tok", default=0, least=0)
    dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise BadSetup("model", f"config.json: unknown torch_dtype {shown(dtype)}; known are {', '.join(_DTYPE_BYTES)}")
    if bool(experts) != bool(per_token) or per_token > experts:
        raise BadSetup("model", f"config.json: a token cannot be sent to {per_token} of {experts} experts")
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    dense = 0 if experts else (2 if kind in _TWO_MATRICES else 3) * hidden * inner
    expert_inner = _number(config, "moe_intermediate_size", default=inner)
    expert = 3 * hidden * expert_inner if experts else 0
    vocab = _number(config, "vocab_size")
    vocabulary = vocab * hidden
    tied = config.get("tie_word_embeddings")
    embeddings = vocabulary if (kind in _TIED if tied is None else tied) else 2 * vocabulary
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
        embedding_params=embeddings,
        layer_bits=_layer_bits(config.get("quantization_config")),
        max_context_tokens=_number(config, "max_position_embeddings", "n_positions", default=0) or None,
        hidden=hidden,
        inner=per_token * expert_inner if experts else inner,
        vocab=vocab,
    )


def _default_kv_heads(config: dict[str, Any], kind: str, heads: int) -> int:
    """Return the KV heads of a config that names them in another way."""
    if kind == "falcon" and config.get("new_decoder_architecture"):
        return _number(config, "num_kv_heads", default=heads)
    multi_query = kind in ("falcon", "gpt_bigcode") and config.get("multi_query") is not False
    return 1 if multi_query else heads


def _layer_bits(quantised: Any) -> int | None:
    """Return the bits of a weight by `quantization_config`, or None.

    Raises BadSetup for an unknown method.
    """
    if quantised is None:
        return None
    values = quantised if isinstance(quantised, dict) else {}
    method = str(values.get("quant_method") or "").lower()
    if not method and (values.get("load_in_4bit") or values.get("load_in_8bit")):
        method = "bitsandbytes"
    match method:
        case "gptq" | "awq":
            return _number(values, "bits", "w_bit", default=4)
        case "bitsandbytes":
            return 4 if values.get("load_in_4bit") else 8
        case "fp8" | "fbgemm_fp8":
            return 8
        case "compressed-tensors":
            groups = values.get("config_groups")
            first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
            weights = first.get("weights") if isinstance(first, dict) else None
            return _number(weights if isinstance(weights, dict) else {}, "num_bits")
    known = "gptq, awq, bitsandbytes, fp8, fbgemm_fp8, compressed-tensors"
    raise BadSetup(
        "model", f"config.json: quantization_config: unknown quant_method {shown(method)}; known are {known}"
    )


def _number(config: dict[str, Any], *names: str, default: int | None = None, least: int = 1) -> int:
    for name in names:
        if (value := config.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
                raise BadSetup("model", f"config.json: {name} is {shown(value)}, not {least} to {MOST}")
            return value
    if default is None:
        raise BadSetup("model", f"config.json has no {names[0]}")
    return default
