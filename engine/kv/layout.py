"""The shape of one KV block, which both ends of a transfer must share."""

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SCALE_BYTES = 2
"""Of a quantised vector's scale, a bfloat16."""
KvDtype = Literal["auto", "int8", "fp8"]
"""What keys and values are kept in. auto: what they are computed in. fp8: float8_e4m3fn."""
KV_FORMAT = 2
"""Raised with every change of how blocks are laid out, named (`block_keys.py`) or fingerprinted: what was made by one version
is then neither moved to nor brought back by another."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """One block holds `block_tokens` tokens of all layers, head-major.

    The pool is [num_blocks, kv_heads, layers, 2, block_tokens, head_dim], so that a block is one contiguous
    span, and the part of any group of KV heads is one too. Where it is quantised, each [block_tokens, head_dim] is
    of one byte each, and its `block_tokens` scales follow it: a vector is its values times its scale.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    """What keys and values are computed in."""
    kept: KvDtype = "auto"

    @property
    def quantised(self) -> bool:
        """Each vector has a scale."""
        return self.kept != "auto"

    @property
    def vector_bytes(self) -> int:
        """Bytes of one key or value of one head and layer, its scale included."""
        return self.head_dim + SCALE_BYTES if self.quantised else self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head within a block."""
        return self.layers * 2 * self.block_tokens * self.vector_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return self.kv_heads * self.head_bytes

    def fingerprint(self, weights: bytes) -> bytes:
        """What two workers must share before blocks move between them: weights, layout and dtype. 32 bytes."""
        shape = f"{self.layers},{self.kv_heads},{self.head_dim},{self.block_tokens},{self.dtype}"
        shape += f",{self.kept}" if self.quantised else ""
        shape += f",{KV_FORMAT}"
        return blake2b(shape.encode() + weights, digest_size=32).digest()

    def part(self, ranks: int) -> "KvLayout":
        """What each of so many tensor-parallel ranks has of a block."""
        assert self.kv_heads % ranks == 0
        return replace(self, kv_heads=self.kv_heads // ranks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, the last one perhaps partly filled."""
        return -(-num_tokens // self.block_tokens)
