"""Numbers of a model's parameters, from its config. Norms, biases, convolutions and routers of experts are left out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sizing.models.model_layers import Attention, LayerKind, delta_widths, mamba_widths, number
from workloads.errors import BadSetup

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
