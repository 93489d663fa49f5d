"""Paged attention by the CPU kernels.

They read blocks in place, each once per group of query heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.backends.torch.attention import PagedAttention
from engine.backends.torch.native.kernels import Kernels, attention_shape
from engine.core_types import Chunk
from kvcache.layout import KvLayout

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
