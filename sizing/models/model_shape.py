"""Properties of a model that decide the duration of its steps: numbers of parameters, and the KV of a sequence.

KV is a function of the context: layers with full attention keep all tokens, those with a window its last ones, and
recurrent layers a state of fixed size (`model_layers.py`). The numbers of parameters are in `model_layers.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelRefused
from engine.model.hub import CONFIG_FILES, fetch
from engine.model.model_dir import ModelDir
from kvcache.layout import DTYPE_BYTES
from sizing.models.model_layers import LayerGroup, attention_of, groups_of, kinds_of, number, weights_of
from workloads.request import BadSetup, shown

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
"""Config of Llama 3.1 8B, used when no model is named."""
MIXED_FORMATS = {"mxfp4": 4.25}
"""Bits of an expert's weight, its share of a scale included, in formats that quantise nothing but experts."""
STATES = 2
"""States that a sequence holds in each recurrent layer, and that each of its decode steps reads or writes: the running
one, and that of its last boundary, which can be lent. vLLM counts as many of a request."""
_TOP = ("quantization_config", "tie_word_embeddings", "torch_dtype", "dtype", "model_type")
"""Keys that a config with a `text_config` may have beside it."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only model."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    """Heads whose keys and values are kept; 1 with MLA."""
    head_dim: int
    groups: tuple[LayerGroup, ...]
    """Layers that remember something, by what they remember."""
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
    expert_layers: int = 0
    """Layers with routed experts."""
    embedding_params: int = 0
    """Parameters of embeddings and output layer."""
    layer_bits: float | None = None
    """Bits of a quantised layer's weight, without scales; None: `dtype_bytes`."""
    only_experts: bool = False
    """Whether `layer_bits` are those of experts only."""
    latent: bool = False
    """Whether all heads share one vector of a token (MLA), which every tensor-parallel rank keeps whole."""
    draft_layers: int = 0
    """Layers of a module that drafts tokens (MTP), which a server may leave out."""
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
        return round((self.params - self._narrow_params) * self.dtype_bytes + self._narrow_params * self._layer_bytes)

    @property
    def expert_bytes(self) -> float:
        """Bytes of all routed experts."""
        return self.expert_params * self._layer_bytes

    @property
    def weights_in_words(self) -> str:
        """Sizes of the weights by type, for display."""
        if self.layer_bits is None:
            return f"{self.params / 1e9:.2f} G parameters x {self.dtype_bytes} B"
        layers, rest = self._narrow_params / 1e9, (self.params - self._narrow_params) / 1e9
        return f"{layers:.2f} G parameters x {self._layer_bytes:g} B + {rest:.2f} G x {self.dtype_bytes} B"

    @property
    def _narrow_params(self) -> int:
        """Parameters with `layer_bits`."""
        return self.expert_params if self.only_experts else self.params - self.embedding_params

    @property
    def kv_dtype(self) -> str:
        """Data type of stored and moved KV; models with narrower weights compute KV in 16 bits too."""
        return "float32" if self.dtype_bytes == 4 else "bfloat16"

    @property
    def kv_dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.kv_dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token in all layers with attention, while it is within their windows."""
        return self.kv_dtype_bytes * sum(group.layers * group.token_elements for group in self.groups)

    @property
    def is_uniform(self) -> bool:
        """Whether each token adds as many bytes: no windows and no states."""
        return all(group.window is None and group.token_elements for group in self.groups)

    @property
    def undivided(self) -> str:
        """Reason why the vllm engine takes one rank only: what the layers keep; empty: it takes several."""
        return "recurrent states" if self.state_bytes else ""

    def kv_bytes(self, tokens: float, in_flight: int = 0, dtype_bytes: float | None = None) -> float:
        """Return the bytes that a sequence of so many tokens holds in all layers, with `STATES` states.

        `in_flight`: tokens of steps under way, which windows keep too. `dtype_bytes`: of an element of KV, where it is
        not stored as computed; states are. Layers that draft are not among them.
        """
        own = self.kv_dtype_bytes if dtype_bytes is None else dtype_bytes
        sizes = (own * group.layers * group.token_elements * group.tokens(tokens, in_flight) for group in self.groups)
        return sum(sizes) + STATES * self.state_bytes

    def loan_bytes(self, tokens: float) -> float:
        """Return the bytes that a loan of so many tokens moves: all full layers, the last windows, one state."""
        return tokens * self.mean_token_bytes(tokens, states=1)

    def mean_token_bytes(self, tokens: float, states: int = STATES) -> float:
        """Return the bytes for each token of a sequence of so many tokens, with so many states."""
        if self.is_uniform:
            return self.kv_bytes_per_token
        return (self.kv_bytes(tokens) - (STATES - states) * self.state_bytes) / tokens

    @property
    def state_bytes(self) -> float:
        """Bytes of one state in all recurrent layers."""
        return sum(group.layers * group.state_bytes(self.kv_dtype_bytes) for group in self.groups)

    @property
    def draft_bytes_per_token(self) -> int:
        """Bytes of a token in the layers that draft, which have full attention."""
        full = next((group.token_elements for group in self.groups if group.window is None), 0)
        return self.draft_layers * full * self.kv_dtype_bytes

    @property
    def _layer_bytes(self) -> float:
        """Bytes of a weight in a layer."""
        return self.dtype_bytes if self.layer_bits is None else self.layer_bits / 8

    @property
    def attention_flops_per_pair(self) -> int:
        """FLOP of full attention per pair of a token and one before it: products with its key and with its value."""
        return sum(group.layers * group.pair_flops for group in self.groups if group.window is None)

    def attention_flops(self, tokens: float, pairs: float) -> float:
        """Return the FLOP of attention of so many prompt tokens with so many tokens before them, as pairs."""
        windows = (group for group in self.groups if group.window is not None)
        return self.attention_flops_per_pair * pairs + sum(
            group.layers * group.pair_flops * min(pairs, tokens * (group.window or 0)) for group in windows
        )

    def weight_bytes_read(self, num_tokens: float, expert_ranks: int = 1) -> float:
        """Return the weight bytes that a step of so many tokens reads, with experts chosen at random.

        With `expert_ranks` above 1 a worker has so small a part of the experts, which as many workers' tokens meet.
        """
        if not self.experts:
            return float(self.weight_bytes)
        missed = float((1 - self.experts_per_token / self.experts) ** (num_tokens * expert_ranks))
        return self.weight_bytes - self.expert_bytes * (1 - (1 - missed) / expert_ranks)


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
    kind = str(config.get("model_type") or "")
    hidden, layers = number(config, "hidden_size", "n_embd"), number(config, "num_hidden_layers", "n_layer")
    attention = attention_of(config, kind, hidden)
    kinds = kinds_of(config, kind, layers)
    dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise BadSetup("model", f"config.json: unknown torch_dtype {shown(dtype)}; known are {', '.join(_DTYPE_BYTES)}")
    weights = weights_of(config, kind, hidden, kinds, attention)
    bits, only_experts = _layer_bits(config.get("quantization_config"))
    common = weights.common
    return ModelShape(
        name=name,
        layers=layers,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        groups=groups_of(config, kind, hidden, kinds, attention),
        dtype_bytes=_DTYPE_BYTES[dtype],
        params=common + weights.experts + weights.embeddings,
        active_params=common + weights.active_experts,
        expert_params=weights.experts,
        experts=weights.num_experts,
        experts_per_token=weights.experts_per_token,
        expert_layers=weights.expert_layers,
        embedding_params=weights.embeddings,
        layer_bits=bits,
        only_experts=only_experts,
        latent=bool(attention.latent),
        draft_layers=number(config, "num_nextn_predict_layers", "mtp_num_hidden_layers", default=0, least=0),
        max_context_tokens=number(config, "max_position_embeddings", "n_positions", default=0) or None,
        hidden=hidden,
        inner=weights.inner,
        vocab=number(config, "vocab_size"),
    )


def _layer_bits(quantised: Any) -> tuple[float | None, bool]:
    """Return the bits of a weight by `quantization_config`, or None; and whether they are those of experts only.

    Raises BadSetup for an unknown method.
    """
    if quantised is None:
        return None, False
    values = quantised if isinstance(quantised, dict) else {}
    method = str(values.get("quant_method") or "").lower()
    if not method and (values.get("load_in_4bit") or values.get("load_in_8bit")):
        method = "bitsandbytes"
    match method:
        case "gptq" | "awq":
            return number(values, "bits", "w_bit", default=4), False
        case "bitsandbytes":
            return 4 if values.get("load_in_4bit") else 8, False
        case "fp8" | "fbgemm_fp8":
            return 8, False
        case method if method in MIXED_FORMATS:
            return MIXED_FORMATS[method], True
        case "compressed-tensors":
            groups = values.get("config_groups")
            first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
            weights = first.get("weights") if isinstance(first, dict) else None
            return number(weights if isinstance(weights, dict) else {}, "num_bits"), False
    known = "gptq, awq, bitsandbytes, fp8, fbgemm_fp8, compressed-tensors, " + ", ".join(MIXED_FORMATS)
    raise BadSetup(
        "model", f"config.json: quantization_config: unknown quant_method {shown(method)}; known are {known}"
    )
