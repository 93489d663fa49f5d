"""Layers of a model, and the memory that each has of a sequence: all tokens, the last ones, or a state.

    key of config.json                                     layers
    layer_types, layers_block_type                         each by its name
    hybrid_override_pattern                                each by its letter (Nemotron-H)
    linear_attn_config                                     those of kda_layers have a state (Kimi Linear)
    linear_num_value_heads, full_attention_interval        every n-th has full attention, others a state
    sliding_window_pattern, or a model type of `_PERIODS`  every n-th has full attention, others a window
    use_sliding_window, max_window_layers                  a window from that layer on (Qwen2, Qwen3)
    sliding_window alone                                   a window in each (Mistral)
    kv_lora_rank                                           MLA: one latent vector of a token for all heads

States are those of vLLM: the last inputs of a convolution, and a matrix for each head.

Numbers of a model's parameters, from its config. Norms, biases, convolutions and routers of experts are left out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workloads.request import BadSetup, shown

MOST = 1 << 30
"""Largest accepted number in a config."""
LayerKind = Literal["full", "window", "state", "mlp", "experts"]
"""Memory of a layer; the last two are layers of their own that remember nothing (Nemotron-H)."""
_TYPES: dict[str, LayerKind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "linear_attention": "state",
    "mamba": "state",
    "mlp": "mlp",
    "moe": "experts",
}
_LETTERS: dict[str, LayerKind] = {"*": "full", "M": "state", "-": "mlp", "E": "experts"}
_PERIODS = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "gemma3": 6, "gemma3_text": 6}
"""Period of full attention among windows, of model types whose configs may leave it out."""
_WINDOWS = {"gemma2": 4096, "gemma3": 4096, "gemma3_text": 4096, "gpt_oss": 128}
"""Windows of configs that leave them out."""
MAMBA = frozenset({"mamba", "mamba2", "falcon_mamba"})
"""Model types without attention."""
_FLOAT32_STATES = frozenset({"nemotron_h", "kimi_linear"})
"""Model types whose state vLLM keeps in float32 where the config does not tell."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that remember alike."""

    layers: int
    token_elements: int = 0
    """Elements that a layer keeps of a token: keys and values of all KV heads, or MLA's latent vector."""
    window: int | None = None
    """Number of last tokens that a layer keeps; None: all."""
    conv_elements: int = 0
    """Elements of a layer's convolution state, in the dtype of KV."""
    state_elements: int = 0
    """Elements of a layer's recurrent state."""
    state_dtype_bytes: int | None = None
    """Bytes of an element of the recurrent state; None: as KV."""
    pair_flops: int = 0
    """FLOP of a layer's attention for a prompt token and one before it."""
    decode_pair_flops: int = 0
    """The same for a decoding sequence, which with MLA reads the latent vectors as they are."""

    @property
    def kept(self) -> str:
        """Memory of its layers, for display."""
        if not self.token_elements:
            return "recurrent states"
        return "full attention" if self.window is None else "sliding windows"

    def tokens(self, tokens: float, in_flight: int = 0) -> float:
        """Return the number of a sequence's tokens that a layer keeps.

        A window has `in_flight` more, which steps under way may still read.
        """
        if self.token_elements == 0:
            return 0
        return tokens if self.window is None else min(tokens, self.window + in_flight)

    def state_bytes(self, kv_dtype_bytes: float) -> float:
        """Return the bytes of one state of one layer."""
        own = kv_dtype_bytes if self.state_dtype_bytes is None else self.state_dtype_bytes
        return self.conv_elements * kv_dtype_bytes + self.state_elements * own


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of a model's layers."""

    heads: int
    kv_heads: int
    """Number of heads whose keys and values are kept; 1 with MLA, whose heads share a vector."""
    head_dim: int
    """Width of a query."""
    value_dim: int
    latent: int = 0
    """Elements of MLA's vector of a token; 0: no MLA."""
    latent_rank: int = 0
    """Elements of that vector without its part for positions."""

    def group(self, layers: int, window: int | None = None) -> LayerGroup:
        elements = self.latent or self.kv_heads * (self.head_dim + self.value_dim)
        width = self.latent + self.latent_rank if self.latent else self.head_dim + self.value_dim
        flops = 2 * self.heads * (self.head_dim + self.value_dim)
        return LayerGroup(layers, elements, window, pair_flops=flops, decode_pair_flops=2 * self.heads * width)


def attention_of(config: dict[str, Any], kind: str, hidden: int) -> Attention:
    """Return the attention of a config.

    Raises BadSetup.
    """
    if kind in MAMBA:  # its heads, which ranks share, are not those of attention
        return Attention(number(config, "num_heads", default=hidden), 0, 0, 0)
    heads = number(config, "num_attention_heads", "n_head")
    if heads > hidden:
        raise BadSetup("model", f"config.json: {heads} attention heads are more than the hidden size, {hidden}")
    if config.get("kv_lora_rank"):
        parts = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        if lacking := next((name for name in parts if config.get(name) is None), None):
            raise BadSetup(
                "model", f"config.json: kv_lora_rank: latent attention (MLA) needs {lacking}, which is missing"
            )
        rank, (rope, nope, value) = number(config, "kv_lora_rank"), (number(config, name) for name in parts)
        return Attention(heads, 1, nope + rope, value, rank + rope, rank)
    kv_heads = number(config, "num_key_value_heads", default=_default_kv_heads(config, kind, heads))
    head_dim = number(config, "head_dim", default=hidden // heads)
    return Attention(heads, kv_heads, head_dim, head_dim)


def groups_of(
    config: dict[str, Any], kind: str, hidden: int, kinds: Sequence[LayerKind], attention: Attention
) -> tuple[LayerGroup, ...]:
    """Return the layers that remember something, full attention first.

    Raises BadSetup.
    """
    counts = Counter(kinds)
    groups = []
    if counts["full"]:
        groups.append(attention.group(counts["full"]))
    if counts["window"]:
        groups.append(attention.group(counts["window"], _window(config, kind)))
    if counts["state"]:
        groups.append(_state(config, kind, hidden, counts["state"]))
    return tuple(groups)


def kinds_of(config: dict[str, Any], kind: str, layers: int) -> list[LayerKind]:
    """Return the kind of each layer.

    Raises BadSetup for a layer of unknown kind.
    """
    for name, names in (
        ("layer_types", _TYPES),
        ("layers_block_type", _TYPES),
        ("hybrid_override_pattern", _LETTERS),
    ):
        if (told := config.get(name)) is not None:
            return _named(name, told, names, layers)
    if isinstance(linear := config.get("linear_attn_config"), dict):  # counted from 1
        recurrent = linear.get("kda_layers")
        if not isinstance(recurrent, list):
            raise BadSetup("model", f"config.json: linear_attn_config.kda_layers is {shown(recurrent)}, not a list")
        return ["state" if layer in recurrent else "full" for layer in range(1, layers + 1)]
    if kind in MAMBA:
        return ["state"] * layers
    if "linear_num_value_heads" in config:
        return _periodic(layers, number(config, "full_attention_interval", default=4), "state")
    if unknown := next((name for name in config if name.startswith("mamba_")), None):
        raise BadSetup("model", f"config.json: {unknown}: which layers of {shown(kind)} are recurrent is not known")
    window = _window_or_none(config, kind)
    if window is None or window >= number(config, "max_position_embeddings", default=MOST):
        return ["full"] * layers
    period = config.get("sliding_window_pattern", config.get("_sliding_window_pattern")) or _PERIODS.get(kind)
    if isinstance(period, str):  # such as LLLG: local and global layers
        return ["full" if period[layer % len(period)] == "G" else "window" for layer in range(layers)]
    if period is not None:
        return _periodic(layers, number({"sliding_window_pattern": period}, "sliding_window_pattern"), "window")
    if kind.startswith("qwen"):
        first = number(config, "max_window_layers", default=28, least=0)
        return ["full" if layer < first else "window" for layer in range(layers)]
    return ["window"] * layers


def _named(name: str, told: object, names: dict[str, LayerKind], layers: int) -> list[LayerKind]:
    if not isinstance(told, list | str) or len(told) != layers:
        raise BadSetup("model", f"config.json: {name} is {shown(told)}, not the kinds of {layers} layers")
    if unknown := next((each for each in told if each not in names), None):
        raise BadSetup("model", f"config.json: {name}: unknown layer {shown(unknown)}; known are {', '.join(names)}")
    return [names[each] for each in told]


def _periodic(layers: int, period: int, others: LayerKind) -> list[LayerKind]:
    return ["full" if (layer + 1) % period == 0 else others for layer in range(layers)]


def _window_or_none(config: dict[str, Any], kind: str) -> int | None:
    """Return the window; None where the config has none, or one that is not used."""
    if not config.get("use_sliding_window", not kind.startswith("qwen")):
        return None
    return number(config, "sliding_window", default=_WINDOWS.get(kind, 0), least=0) or None


def _window(config: dict[str, Any], kind: str) -> int:
    if "chunked_attention" in (config.get("layer_types") or ()):
        return number(config, "attention_chunk_size")
    window = _window_or_none({**config, "use_sliding_window": True}, kind)
    if window is None:
        raise BadSetup("model", "config.json has layers with a window and no sliding_window")
    return window


def _state(config: dict[str, Any], kind: str, hidden: int, layers: int) -> LayerGroup:
    """Return the layers with a state: gated delta net, Kimi's delta attention, Mamba 2, or Mamba."""
    kept = str(config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype") or "")
    four = kept == "float32" or (not kept and kind in _FLOAT32_STATES)
    width, state, kernel = state_widths(config, kind, hidden)
    return LayerGroup(
        layers, conv_elements=width * (kernel - 1), state_elements=state, state_dtype_bytes=4 if four else None
    )


def state_widths(config: dict[str, Any], kind: str, hidden: int) -> tuple[int, int, int]:
    """Return the width of the convolution, the elements of the state, and the kernel's size.

    Raises BadSetup.
    """
    if isinstance(linear := config.get("linear_attn_config"), dict):
        heads, dim = number(linear, "num_heads"), number(linear, "head_dim")
        return 3 * heads * dim, heads * dim * dim, number(linear, "short_conv_kernel_size", default=4)
    if "linear_num_value_heads" in config:
        keys, values = delta_widths(config)
        state = values * number(config, "linear_key_head_dim")
        return 2 * keys + values, state, number(config, "linear_conv_kernel_dim", default=4)
    kernel = number(config, "conv_kernel", "mamba_d_conv", default=4)
    size = number(config, "ssm_state_size", "mamba_d_state", "state_size")
    inner, heads = mamba_widths(config, kind, hidden)
    if not heads:
        return inner, inner * size, kernel
    groups = number(config, "n_groups", "mamba_n_groups", "mamba_num_groups", default=1)
    return inner + 2 * groups * size, inner * size, kernel


def delta_widths(config: dict[str, Any]) -> tuple[int, int]:
    """Return the widths of all keys and of all values of a gated delta net."""
    keys = number(config, "linear_num_key_heads") * number(config, "linear_key_head_dim")
    return keys, number(config, "linear_num_value_heads") * number(config, "linear_value_head_dim")


def mamba_widths(config: dict[str, Any], kind: str, hidden: int) -> tuple[int, int]:
    """Return the inner width and the heads of a Mamba layer; no heads: the first Mamba."""
    expanded = hidden * number(config, "mamba_expand", "expand", default=2)
    if kind in ("mamba", "falcon_mamba"):
        return number(config, "intermediate_size", default=expanded), 0
    heads = number(config, "mamba_num_heads", "mamba_n_heads", "num_heads")
    if isinstance(config.get("mamba_d_head"), str):  # auto
        return expanded, heads
    return heads * number(config, "mamba_head_dim", "mamba_d_head", "head_dim"), heads


def _default_kv_heads(config: dict[str, Any], kind: str, heads: int) -> int:
    """Return the KV heads of a config that names them in another way."""
    if kind == "falcon" and config.get("new_decoder_architecture"):
        return number(config, "num_kv_heads", default=heads)
    multi_query = kind in ("falcon", "gpt_bigcode") and config.get("multi_query") is not False
    return 1 if multi_query else heads


def number(config: dict[str, Any], *names: str, default: int | None = None, least: int = 1) -> int:
    """Return the first of the names that the config has.

    Raises BadSetup for a value that is no number, and for none without a `default`.
    """
    for name in names:
        if (value := config.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
                raise BadSetup("model", f"config.json: {name} is {shown(value)}, not {least} to {MOST}")
            return value
    if default is None:
        raise BadSetup("model", f"config.json has no {names[0]}")
    return default


_TWO_MATRICES = frozenset(
    ("opt", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "codegen", "bloom", "falcon", "phi", "starcoder2", "nemotron")
) | {"nemotron_h"}
"""Model types whose MLP has no gate, so two matrices instead of three."""
_ATTENTION_GATES = ("qwen3_next", "qwen3_5")
"""Beginnings of model types whose attention has a gate as wide as its queries."""
_TIED = frozenset(
    ("opt", "gpt2", "gpt_bigcode", "bloom", "falcon", "starcoder2", "cohere", "cohere2", "gemma", "gemma2", "gemma3")
) | {"gemma3_text", "gemma3n", "gemma3n_text"}
"""Model types whose output layer is their embeddings by default."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of parameters, and widths that decide a step's memory."""

    common: int
    """Parameters of layers that multiply every token."""
    experts: int
    """Parameters of all routed experts."""
    active_experts: int
    """Parameters of the experts that a token is routed to."""
    embeddings: int
    """Parameters of embeddings and output layer."""
    inner: int
    """Width of the MLP's inside for a token, of all its experts together; the widest layer's."""
    num_experts: int
    experts_per_token: int
    expert_layers: int
    """Layers with routed experts."""


def weights_of(
    config: dict[str, Any], kind: str, hidden: int, kinds: Sequence[LayerKind], attention: Attention
) -> Weights:
    """Return the numbers of a config.

    Raises BadSetup.
    """
    inner = number(config, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", default=4 * hidden)
    experts = number(config, "num_local_experts", "num_experts", "n_routed_experts", default=0, least=0)
    per_token = number(config, "num_experts_per_tok", "num_experts_per_token", default=0, least=0)
    if bool(experts) != bool(per_token) or per_token > experts:
        raise BadSetup("model", f"config.json: a token cannot be sent to {per_token} of {experts} experts")
    gated = kind.startswith(_ATTENTION_GATES) and config.get("attn_output_gate") is not False
    mixing = sum(
        _state_layer(config, kind, hidden) if each == "state" else _attention_layer(config, hidden, attention, gated)
        for each in kinds
        if each not in ("mlp", "experts")
    )
    matrices = 2 if kind in _TWO_MATRICES else 3
    expert_inner = number(config, "moe_intermediate_size", default=inner)
    shared = _shared_inner(config, expert_inner)
    dense_layers, expert_layers = _mlp_layers(config, kind, kinds, experts)
    if kind == "granitemoehybrid" and not experts:
        inner, shared, dense_layers = shared, 0, len(kinds)
    expert = (2 if kind == "nemotron_h" else 3) * hidden * expert_inner
    shared_mlp = (2 if kind == "nemotron_h" else 3) * hidden * shared
    vocabulary, tied = number(config, "vocab_size") * hidden, config.get("tie_word_embeddings")
    return Weights(
        common=mixing + dense_layers * matrices * hidden * inner + expert_layers * shared_mlp,
        experts=expert_layers * experts * expert,
        active_experts=expert_layers * per_token * expert,
        embeddings=vocabulary if (kind in _TIED if tied is None else tied) else 2 * vocabulary,
        inner=max(inner if dense_layers else 0, per_token * expert_inner + shared if expert_layers else 0),
        num_experts=experts,
        experts_per_token=per_token,
        expert_layers=expert_layers if experts else 0,
    )


def _mlp_layers(config: dict[str, Any], kind: str, kinds: Sequence[LayerKind], experts: int) -> tuple[int, int]:
    """Return the numbers of layers with a dense MLP and with experts."""
    if "mlp" in kinds or "experts" in kinds:  # layers of their own
        return kinds.count("mlp"), kinds.count("experts")
    if kind in ("mamba", "mamba2", "falcon_mamba"):
        return 0, 0
    if not experts:
        return len(kinds), 0
    first = number(config, "first_k_dense_replace", default=0, least=0)
    period, dense = number(config, "decoder_sparse_step", default=1), config.get("mlp_only_layers") or ()
    sparse = [at >= first and at not in dense and (at + 1) % period == 0 for at in range(len(kinds))]
    return sparse.count(False), sparse.count(True)


def _shared_inner(config: dict[str, Any], expert_inner: int) -> int:
    """Return the inner width of the experts that every token is sent to."""
    names = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
    count = number(config, "n_shared_experts", "num_shared_experts", default=0, least=0)
    return number(config, *names, default=count * expert_inner, least=0)


def _attention_layer(config: dict[str, Any], hidden: int, attention: Attention, gated: bool) -> int:
    heads, dim = attention.heads, attention.head_dim
    if not attention.latent:
        return hidden * dim * ((3 if gated else 2) * heads + 2 * attention.kv_heads)
    rank = number(config, "q_lora_rank", default=0, least=0)
    queries = rank * (hidden + heads * dim) if rank else hidden * heads * dim
    nope = dim - (attention.latent - attention.latent_rank)
    keys = hidden * attention.latent + attention.latent_rank * heads * (nope + attention.value_dim)
    return queries + keys + heads * attention.value_dim * hidden


def _state_layer(config: dict[str, Any], kind: str, hidden: int) -> int:
    """Return the parameters of a layer with a state."""
    if isinstance(linear := config.get("linear_attn_config"), dict):
        heads, dim = number(linear, "num_heads"), number(linear, "head_dim")
        gates = 2 * (hidden * dim + dim * heads * dim) + hidden * heads
        return 4 * hidden * heads * dim + gates
    if "linear_num_value_heads" in config:
        keys, values = delta_widths(config)
        gates = 2 * number(config, "linear_num_value_heads")
        return hidden * (2 * keys + 2 * values + gates) + values * hidden
    inner, heads = mamba_widths(config, kind, hidden)
    size = number(config, "ssm_state_size", "mamba_d_state", "state_size")
    if heads:
        groups = number(config, "n_groups", "mamba_n_groups", "mamba_num_groups", default=1)
        return hidden * (2 * inner + 2 * groups * size + heads) + inner * hidden
    rank = -(-hidden // 16)
    return 3 * hidden * inner + inner * (2 * rank + 3 * size)
