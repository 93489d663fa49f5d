"""Paged attention behind transformers' attention interface.

Every attention layer of a model calls a `PagedAttention` instead of its own kernel. It writes the new keys and values
into the pool, and attends over the blocks of each sequence. Backends: `attention.py` (the reference) and
`native/decoder_layer.py`.

The `sdpa` backend: paged attention by torch's own kernel, the reference for the native one.

The pool [num_blocks, kv_heads, layers, 2, block_tokens, head_dim] is read as rows, one per (block, head, layer, K or
V), each [block_tokens * head_dim]. Gathering whole rows gives keys in the order SDPA wants, and is eight times as fast
as indexing the strided view of a layer.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from engine.core_types import Chunk
from engine.errors import ModelRefused
from kvcache.layout import KvLayout

HARMLESS_ARGUMENTS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_router_logits", "layer_idx"}
)
"""Arguments that transformers passes for other attention kernels. They do not change what attention computes."""


_names = (f"tandem_paged_{number}" for number in itertools.count())


class PagedAttention(ABC):
    """Paged attention that transformers calls for each layer.

    The caller runs `prepare` before each forward.
    """

    @abstractmethod
    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Describe the chunks of the next forward, flattened one after the other."""

    @abstractmethod
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float
    ) -> Tensor:
        """Write keys and values into the pool, then attend with the queries.

        `key` and `value` are [1, kv_heads, tokens, head_dim], `query` is [1, heads, tokens, head_dim]. A token sees
        itself and all tokens before it, or the last `window` of them if `window` is given.

        Scores are multiplied by `scaling`. If `softcap` is not 0, scores are bent into (-softcap, softcap). Returns [1,
        tokens, heads, head_dim], contiguous.
        """

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        """Attend as transformers' attention interface asks.

        Raises ModelRefused for an argument that paged attention cannot honour.
        """
        refuse_unknown(module, attention_mask, is_causal, others)
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return self.attend(layer, query, key, value, scale, sliding_window, softcap or 0.0), None


def refuse_unknown(
    module: torch.nn.Module, attention_mask: object, is_causal: bool | None, others: dict[str, object]
) -> None:
    """Refuse a model that passes an unknown argument, because the argument could change the result.

    No mask is made for the model (`use_attention`), so a mask that arrives here is the model's own. Raises
    ModelRefused.
    """
    if attention_mask is not None:
        raise ModelRefused("its attention makes a mask of its own, which paged attention does not support")
    unknown = {name for name, value in others.items() if value is not None and value is not False}
    if unknown := unknown - HARMLESS_ARGUMENTS:
        raise ModelRefused(f"its attention uses {', '.join(sorted(unknown))}, which paged attention does not support")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ModelRefused("its attention is not causal")


def no_mask(*args: object, **options: object) -> None:
    """Return no mask: paged attention needs none."""


def use_attention(model: torch.nn.Module, attention: Any, mask: Callable[..., Tensor | None] = no_mask) -> None:
    """Have every layer of the model call `attention`, with the masks that `mask` makes for it."""
    name = next(_names)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)  # type: ignore[operator]


@dataclass(slots=True)
class _Span:
    """Chunk of the flattened batch: tokens [offset, offset + count) are positions [start, end)."""

    offset: int
    start: int
    count: int
    table: Tensor  # [blocks]
    rows: Tensor  # [1, kv_heads, blocks]: keys of layer 0

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass
class PagedBatch:
    """Slots and masks of a flattened batch's tokens, made once per step and used by every layer."""

    layout: KvLayout
    prefills: list[_Span] = field(default_factory=list)
    decodes: list[_Span] = field(default_factory=list)
    slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    """Slot of each token's key in layer 0, [tokens * kv_heads], in units of head_dim."""

    @classmethod
    def of(cls, layout: KvLayout, chunks: Sequence[Chunk]) -> "PagedBatch":
        batch, offset, width = cls(layout), 0, layout.block_tokens
        blocks: list[int] = []
        offsets: list[int] = []
        for chunk in chunks:
            table = torch.tensor(chunk.sequence.blocks[: layout.blocks_for(chunk.end)])
            span = _Span(offset, chunk.start, chunk.count, table, _rows(layout, table[None]))
            (batch.decodes if chunk.count == 1 else batch.prefills).append(span)
            blocks += (chunk.sequence.blocks[position // width] for position in range(chunk.start, chunk.end))
            offsets += (position % width for position in range(chunk.start, chunk.end))
            offset += chunk.count
        rows = _rows(layout, torch.tensor(blocks)[:, None])[:, :, 0]  # [tokens, kv_heads]
        batch.slots = (rows * width + torch.tensor(offsets)[:, None]).reshape(-1)
        return batch

    @cached_property
    def decode_places(self) -> Tensor:
        """Places of the single-token chunks in the flattened batch, [decodes]."""
        return torch.tensor([span.offset for span in self.decodes])

    @cached_property
    def decode_tables(self) -> Tensor:
        """Block tables of the single-token chunks, padded with block 0, [decodes, blocks]."""
        return torch.nn.utils.rnn.pad_sequence([span.table for span in self.decodes], batch_first=True)

    @cached_property
    def decode_rows(self) -> Tensor:
        """Rows of the single-token chunks' keys in layer 0, [decodes, kv_heads, blocks]."""
        return _rows(self.layout, self.decode_tables)

    @cached_property
    def _masks(self) -> dict[Any, Tensor]:
        return {}

    def decode_mask(self, window: int | None) -> Tensor:
        """Return the positions that each single token sees, [decodes, 1, 1, positions]."""
        if (mask := self._masks.get(("decode", window))) is None:
            positions = torch.arange(self.decode_tables.shape[1] * self.layout.block_tokens)
            own = torch.tensor([span.start for span in self.decodes])[:, None]
            mask = self._masks[("decode", window)] = _visible(own, positions, window)[:, None, None]
        return mask

    def prefill_mask(self, span: _Span, window: int | None) -> Tensor:
        """Return the positions that each token of a chunk sees, [count, positions]."""
        if (mask := self._masks.get((span.offset, window))) is None:
            positions = torch.arange(span.end)
            mask = self._masks[(span.offset, window)] = _visible(positions[span.start :, None], positions, window)
        return mask


def _visible(own: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Return the causal mask; with `window`, a token sees only so many last positions, its own included."""
    mask = positions <= own
    return mask if window is None else mask & (positions > own - window)


class SdpaPagedAttention(PagedAttention):
    """Paged attention over a pool [blocks, kv_heads, layers, 2, block_tokens, head_dim]."""

    def __init__(self, pool: Tensor, layout: KvLayout) -> None:
        self.batch = PagedBatch(layout)
        self._layout = layout
        self._rows = pool.view(-1, layout.block_tokens * layout.head_dim)
        self._slots = pool.view(-1, layout.head_dim)

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        self.batch = PagedBatch.of(self._layout, chunks)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float
    ) -> Tensor:
        batch = self.batch
        self._write(layer, key, value)
        out = torch.empty_like(query)
        for span in batch.prefills:
            rows = slice(span.offset, span.offset + span.count)
            out[:, :, rows] = self._prefill(layer, span, query[:, :, rows], scaling, window, softcap)
        if batch.decodes:
            places = batch.decode_places
            out[0, :, places] = self._decode(layer, query[0, :, places], scaling, window, softcap)
        return out.transpose(1, 2).contiguous()

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write new keys and values, [1, kv_heads, tokens, head_dim], into their slots."""
        slots = self.batch.slots + 2 * layer * self._layout.block_tokens
        self._slots.index_copy_(0, slots, key[0].transpose(0, 1).reshape(-1, key.shape[-1]))
        slots = slots + self._layout.block_tokens
        self._slots.index_copy_(0, slots, value[0].transpose(0, 1).reshape(-1, value.shape[-1]))

    def _gather(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of `rows` [n, kv_heads, blocks], each [n, kv_heads, positions, head_dim]."""
        n, kv_heads, blocks = rows.shape
        shape = (n, kv_heads, blocks * self._layout.block_tokens, self._layout.head_dim)
        flat = rows.reshape(-1) + 2 * layer
        return self._rows[flat].view(shape), self._rows[flat + 1].view(shape)

    def _prefill(
        self,
        layer: int,
        span: _Span,
        query: Tensor,
        scaling: float,
        window: int | None,
        softcap: float,
    ) -> Tensor:
        """Attend for one chunk.

        `query` and the result are [1, heads, count, head_dim].
        """
        keys, values = self._gather(layer, span.rows)
        keys, values = keys[:, :, : span.end], values[:, :, : span.end]
        if softcap:
            return _softcapped(query, keys, values, self.batch.prefill_mask(span, window), scaling, softcap)
        sees_all = window is None or span.end <= window
        if span.start == 0 and sees_all:
            return scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
        mask = self.batch.prefill_mask(span, window)
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True)

    def _decode(self, layer: int, query: Tensor, scaling: float, window: int | None, softcap: float) -> Tensor:
        """Attend for all single tokens in one call.

        `query` and the result are [heads, decodes, head_dim].
        """
        heads, count, head_dim = query.shape
        keys, values = self._gather(layer, self.batch.decode_rows)
        mask = self.batch.decode_mask(window)
        # A mask is added to scores, so NaN in unseen slots (of the block's former owner, or of padding) would spread.
        unseen = ~mask.transpose(2, 3)
        keys.masked_fill_(unseen, 0)  # these are copies
        values.masked_fill_(unseen, 0)
        # The heads that share a KV head become its query positions, so that no key is repeated.
        grouped = query.transpose(0, 1).reshape(count, self._layout.kv_heads, -1, head_dim)
        if softcap:
            out = _softcapped(grouped, keys, values, mask, scaling, softcap)
        else:
            out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
        return out.reshape(count, heads, head_dim).transpose(0, 1)


def _rows(layout: KvLayout, tables: Tensor) -> Tensor:
    """Return the rows of the pool that hold keys of layer 0: [n, blocks] to [n, kv_heads, blocks].

    Keys of layer l are 2 * l rows further, and its values one row more.
    """
    heads = torch.arange(layout.kv_heads)[None, :, None]
    return (tables[:, None, :] * layout.kv_heads + heads) * (layout.layers * 2)


def _softcapped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    """Attend with scores bent to (-softcap, softcap), which torch's SDPA does not offer."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.matmul(query, keys.transpose(2, 3)) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values)
