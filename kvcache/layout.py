"""Shape of one KV block, which both ends of a transfer must share.

Memory for rows of whole blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvtransfer.hardware.main_memory import check_fits

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_FORMAT = 2
"""Version of the block format, raised with every change of layout, naming (`block_keys.py`) or fingerprints. Blocks of
another version are neither moved nor restored."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layout of a block: `block_tokens` tokens of all layers, head-major.

    The pool is [num_blocks, kv_heads, layers, 2, block_tokens, head_dim], so a block is one contiguous span, and the
    part of any group of KV heads is one too.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    """Data type of keys and values."""

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head within a block."""
        return self.layers * 2 * self.block_tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return self.kv_heads * self.head_bytes

    def fingerprint(self, weights: bytes) -> bytes:
        """Return the fingerprint that workers must share to exchange blocks: weights, layout and dtype.

        32 bytes.
        """
        shape = f"{self.layers},{self.kv_heads},{self.head_dim},{self.block_tokens},{self.dtype}"
        shape += f",{KV_FORMAT}"
        return blake2b(shape.encode() + weights, digest_size=32).digest()

    def part(self, ranks: int) -> "KvLayout":
        """Return the layout of each rank's part of a block."""
        assert self.kv_heads % ranks == 0
        return replace(self, kv_heads=self.kv_heads // ranks)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens, the last one perhaps partly filled."""
        return -(-num_tokens // self.block_tokens)


Allocate = Callable[[int, int], NDArray[np.uint8]]
"""Callable allocate(count, row_bytes) that returns uint8 [count, row_bytes].

Raises MemoryError. An engine of several ranks allocates memory that all of them map."""


def private_rows(count: int, row_bytes: int) -> NDArray[np.uint8]:
    """Allocate rows for this process alone. The system allocates pages at their first write.

    Raises MemoryError.
    """
    try:
        check_fits(count * row_bytes)
        return np.empty((count, row_bytes), np.uint8)
    except (OSError, ValueError) as error:  # the latter: more than an address can express
        raise MemoryError(str(error)) from None
