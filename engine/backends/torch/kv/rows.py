"""Keys and values in the pool, row by row: as computed, or quantised.

A row holds the vectors of one (block, KV head, layer, K or V). A slot is one token's place in a row: row * block_tokens
+ offset.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from engine.kv.layout import KvDtype, KvLayout

TYPES: dict[KvDtype, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Dtypes of quantised vectors, one byte per number."""
LARGEST: dict[KvDtype, int] = {"int8": 127, "fp8": 448}


class KvRows(ABC):
    @abstractmethod
    def write(self, slots: Tensor, vectors: Tensor) -> None:
        """Write `vectors` [n, head_dim] into `slots` [n]."""

    @abstractmethod
    def read(self, rows: Tensor) -> Tensor:
        """Return rows [n] as [n, block_tokens * head_dim], in the dtype that they were computed in."""


def kv_rows(pool: Tensor, layout: KvLayout) -> KvRows:
    return QuantisedRows(pool, layout) if layout.quantised else PlainRows(pool, layout)


class PlainRows(KvRows):
    """Rows of a pool [num_blocks, kv_heads, layers, 2, block_tokens, head_dim]."""

    def __init__(self, pool: Tensor, layout: KvLayout) -> None:
        self._rows = pool.view(-1, layout.block_tokens * layout.head_dim)
        self._slots = pool.view(-1, layout.head_dim)

    def write(self, slots: Tensor, vectors: Tensor) -> None:
        self._slots.index_copy_(0, slots, vectors)

    def read(self, rows: Tensor) -> Tensor:
        return self._rows.index_select(0, rows)


class QuantisedRows(KvRows):
    """Rows of a quantised pool, uint8 [num_blocks, kv_heads, layers, 2, block_tokens * vector_bytes].

    The reference for the CPU and GPU kernels, which write the same bits.
    """

    def __init__(self, pool: Tensor, layout: KvLayout) -> None:
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._kept = layout.kept
        self._width = layout.block_tokens
        self._values_bytes = layout.block_tokens * layout.head_dim
        rows = pool.view(-1, layout.block_tokens * layout.vector_bytes)
        values = rows[:, : self._values_bytes]
        self._values = values.view(len(rows), layout.block_tokens, layout.head_dim)  # torch cannot move float8 by index
        self._scales = rows.view(torch.bfloat16)[:, self._values_bytes // 2 :]

    def write(self, slots: Tensor, vectors: Tensor) -> None:
        values, scales = quantise_vectors(vectors, self._kept)
        rows, offsets = slots // self._width, slots % self._width
        self._values[rows, offsets] = values.view(torch.uint8)
        self._scales[rows, offsets] = scales

    def read(self, rows: Tensor) -> Tensor:
        values = self._values[rows].view(TYPES[self._kept])
        made: Tensor = values.float() * self._scales[rows].float()[..., None]
        return made.to(self._dtype).flatten(1)


def quantise_vectors(vectors: Tensor, kept: KvDtype) -> tuple[Tensor, Tensor]:
    """Quantise [n, head_dim] to values [n, head_dim] of TYPES[kept] and bfloat16 scales [n].

    Each vector is quantised by itself, so that a token's stored KV does not depend on other tokens. A scale is rounded
    up, otherwise the largest value would be clipped.
    """
    wide = vectors.float()
    # a tensor, because GPUs turn division by a number into multiplication
    largest = torch.full((), float(LARGEST[kept]), device=wide.device)
    exact = wide.abs().amax(-1) / largest
    scales = ((exact.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    multiples = wide / torch.where(scales > 0, scales, 1.0)[:, None]
    values = (multiples.round_() if kept == "int8" else multiples).to(TYPES[kept])
    return values, scales.bfloat16()
