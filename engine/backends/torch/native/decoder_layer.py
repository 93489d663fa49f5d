"""Whole decoder layers of the Llama kind, computed by the kernels without transformers' Python in between.

The Llama kind is: a norm, attention with rotary embedding, a residual sum, a norm, a gated MLP, a residual sum. A
layer's name does not decide: it is computed both ways, and replaced only if the results are equal to the bit.

Paged attention by the CPU kernels.

They read blocks in place, each once per group of query heads.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.backends.torch.attention import PagedAttention, use_attention
from engine.backends.torch.native.kernels import Kernels, attention_shape
from engine.backends.torch.native.modules import NativeRmsNorm, PackedGatedMlp, PackedLinear
from engine.core_types import Chunk
from kvcache.layout import KvLayout

log = logging.getLogger(__name__)


LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
PROBED_POSITIONS = (0, 1, 17)
"""Positions of the tokens by which layers are compared."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Arguments that a layer gives its attention besides queries, keys and values."""

    layer: int
    scaling: float
    window: int | None
    softcap: float


class Probe(PagedAttention):
    """Stand-in for attention while layers are compared.

    Its result depends on every element of its inputs.
    """

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Do nothing: there is no pool."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float
    ) -> Tensor:
        self.calls.append(AttentionCall(layer, scaling, window, softcap))
        group = query.shape[1] // key.shape[1]
        weights = torch.tanh(query * key.repeat_interleave(group, 1))
        return (weights * value.repeat_interleave(group, 1)).transpose(1, 2).contiguous()


class NativeDecoderLayer(nn.Module):
    """Layer of the known kind, computed in place of its input's hidden states."""

    def __init__(self, kernels: Kernels, attention: PagedAttention, layer: Any, call: AttentionCall) -> None:
        super().__init__()
        mixer = layer.self_attn
        self._kernels, self._attention, self._call = kernels, attention, call
        self._before_attention, self._before_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self._query, self._key, self._value, self._out = (getattr(mixer, name) for name in PROJECTIONS)
        self._query_norm, self._key_norm = (getattr(mixer, name, None) for name in HEAD_NORMS)
        self._mlp = layer.mlp
        self._head_dim: int = mixer.head_dim

    def forward(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], **others: object) -> Tensor:
        """Overwrite `hidden` [1, tokens, width] with the layer's output; cos and sin are [1, tokens, head_dim]."""
        kernels, call = self._kernels, self._call
        cos, sin = position_embeddings
        normed = self._before_attention(hidden)
        query, key = self._heads(self._query, self._query_norm, normed), self._heads(self._key, self._key_norm, normed)
        value = self._heads(self._value, None, normed)
        kernels.rotate(query, cos, sin)
        kernels.rotate(key, cos, sin)
        seen = self._attention.attend(call.layer, query, key, value, call.scaling, call.window, call.softcap)
        kernels.add_linear(hidden, seen, self._out.packed, self._out.bias)
        gated = kernels.gated(self._before_mlp(hidden), self._mlp.gated)
        kernels.add_linear(hidden, gated, self._mlp.down, None)
        return hidden

    def _heads(self, linear: PackedLinear, norm: NativeRmsNorm | None, x: Tensor) -> Tensor:
        """Return the layer's heads, [1, heads, tokens, head_dim]."""
        heads = self._kernels.linear(x, linear.packed, linear.bias).view(1, x.shape[1], -1, self._head_dim)
        return (heads if norm is None else norm(heads)).transpose(1, 2)


@torch.inference_mode()
def use_native_layers(model: Any, kernels: Kernels, attention: PagedAttention) -> int:
    """Replace the layers of the known kind in place and return their number.

    Their parts must have been replaced before.

    The model is left with an attention that computes nothing; the caller calls `use_attention` again.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not any(map(is_of_kind, layers)):
        return 0
    replaced = 0
    for index, seen in enumerate(_observe(model, layers)):
        if is_of_kind(layers[index]) and seen.can_be_asked_of(layers[index]):
            probe = Probe()
            native = NativeDecoderLayer(kernels, probe, layers[index], seen.calls[0])
            if seen.is_what(native) and probe.calls == seen.calls:
                layers[index] = NativeDecoderLayer(kernels, attention, layers[index], seen.calls[0])
                replaced += 1
    log.info("CPU kernels compute %d of %d layers as a whole", replaced, len(layers))
    return replaced


def is_of_kind(layer: Any) -> bool:
    """Return whether the layer has the known parts, as kernels.

    Whether it computes the same is checked separately.
    """
    if {name for name, _ in layer.named_children()} != {"self_attn", "mlp", *LAYER_NORMS}:
        return False
    names = {name for name, _ in layer.self_attn.named_children()}
    if names not in ({*PROJECTIONS}, {*PROJECTIONS, *HEAD_NORMS}) or not hasattr(layer.self_attn, "head_dim"):
        return False
    norms = [getattr(layer, name) for name in LAYER_NORMS]
    norms += [getattr(layer.self_attn, name) for name in names & {*HEAD_NORMS}]
    linears = [getattr(layer.self_attn, name) for name in PROJECTIONS]
    return (
        all(type(norm) is NativeRmsNorm for norm in norms)
        and all(type(linear) is PackedLinear and linear.last_rows is None for linear in linears)
        and type(layer.mlp) is PackedGatedMlp
        and layer.mlp.last_rows is None
    )


@dataclass(slots=True)
class Seen:
    """One layer's inputs and output in a forward of the model."""

    calls: list[AttentionCall] = field(default_factory=list)
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    output: Any = None

    def can_be_asked_of(self, layer: Any) -> bool:
        """Return whether the layer was called in a way that `NativeDecoderLayer.forward` supports."""
        cos_and_sin = self.options.get("position_embeddings")
        if len(self.calls) != 1 or len(self.arguments) != 1 or not isinstance(cos_and_sin, tuple):
            return False
        hidden, width = self.arguments[0], layer.self_attn.head_dim
        return len(cos_and_sin) == 2 and all(
            isinstance(part, Tensor)
            and part.shape == (1, hidden.shape[1], width)
            and part.dtype == hidden.dtype
            and part.is_contiguous()
            for part in cos_and_sin
        )

    def is_what(self, native: NativeDecoderLayer) -> bool:
        """Return whether the native layer returns the same to the bit."""
        output = native(self.arguments[0].clone(), **self.options)
        return isinstance(self.output, Tensor) and torch.equal(output, self.output)


def _observe(model: Any, layers: nn.ModuleList) -> list[Seen]:
    """Run a forward of a few tokens and return each layer's inputs and output."""
    probe, seen, hooks = Probe(), [Seen() for _ in layers], []
    use_attention(model, probe)

    def before(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], *, layer: Seen) -> None:
        layer.arguments, layer.options = tuple(map(_copied, arguments)), dict(options)
        probe.calls = layer.calls

    def after(_: nn.Module, arguments: object, output: Any, *, layer: Seen) -> None:
        layer.output = _copied(output)

    for module, layer in zip(layers, seen, strict=True):
        hooks.append(module.register_forward_pre_hook(partial(before, layer=layer), with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(after, layer=layer)))
    vocabulary: int = model.config.get_text_config().vocab_size
    tokens = torch.linspace(1, vocabulary - 1, len(PROBED_POSITIONS)).long()
    model(input_ids=tokens[None], position_ids=torch.tensor([PROBED_POSITIONS]), use_cache=False, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return seen


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


ITEM_ROWS = 256
"""Query rows (tokens times heads of a KV head) that one thread takes at a time: keys are unpacked once for them."""


class NativePagedAttention(PagedAttention):
    """The `native` backend."""

    def __init__(self, kernels: Kernels, pool: Tensor, layout: KvLayout, heads: int) -> None:
        self._kernels = kernels
        self._pool = pool
        self._layout = layout
        self._group = heads // layout.kv_heads
        self._shapes = [attention_shape(layout, heads) for _ in range(layout.layers)]
        for layer, shape in enumerate(self._shapes):
            shape.layer = layer
        self._last_only_samples = False
        self.prepare([])

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        width, group = self._layout.block_tokens, self._group
        slots: list[int] = []
        tables: list[int] = []
        items: list[tuple[int, int, int, int]] = []
        sampled: list[tuple[int, int, int, int]] = []
        step = max(1, ITEM_ROWS // group)
        token = 0
        for chunk in chunks:
            blocks, count = chunk.sequence.blocks, chunk.count
            end = chunk.start + count
            slots += (blocks[p // width] * width + p % width for p in range(chunk.start, end))
            table = len(tables)
            tables += blocks[: self._layout.blocks_for(end)]
            items += (
                (token + first, min(step, count - first), chunk.start + first, table) for first in range(0, count, step)
            )
            sampled += (
                (token + first - chunk.start, min(step, chunk.scored.stop - first), first, table)
                for first in range(chunk.scored.start, chunk.scored.stop, step)
            )
            if chunk.samples:
                sampled.append((token + count - 1, 1, end - 1, table))
            token += count
        self._slots = torch.tensor(slots, dtype=torch.long)
        self._tables = torch.tensor(tables, dtype=torch.int32)
        self._all = self._work(items)
        self._sampled = self._work(sampled)

    def trim_last_layer(self) -> None:
        """Attend in the last layer only for the tokens whose logits are wanted."""
        self._last_only_samples = True

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float
    ) -> Tensor:
        shape = self._shapes[layer]
        self._kernels.write_kv(shape, self._pool, self._slots, _dense(key), _dense(value))
        query = _dense(query)
        shape.query_head_stride, shape.query_token_stride = query.stride(1), query.stride(2)
        shape.window, shape.scale, shape.softcap = window or 0, scaling, softcap
        last = self._last_only_samples and layer == self._layout.layers - 1
        items, max_rows = self._sampled if last else self._all
        return self._kernels.attention(shape, query, self._pool, self._tables, items, max_rows)

    def _work(self, items: list[tuple[int, int, int, int]]) -> tuple[Tensor, int]:
        """Return the work items, largest first, and the largest number of rows of one.

        The order keeps the threads equally busy until the end.
        """
        items.sort(key=lambda item: -item[1] * (item[2] + item[1]))
        max_rows = max((count for _, count, *_ in items), default=1) * self._group
        return torch.tensor(items, dtype=torch.long).reshape(-1, 4), max_rows


def _dense(heads: Tensor) -> Tensor:
    """Return [1, heads, tokens, head_dim] with a contiguous last dimension."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()
