"""Fingerprints of block contents, per (block, kv_head), so that what arrives can be checked.

Each span is read as 64-bit words and folded to `sum((word_i + i_th constant) * i_th odd multiplier) mod 2**64`.
The multipliers are odd, so any change confined to one word changes the sum; changes spread over words go
unnoticed with probability about 2**-63. It guards against mistakes of software and hardware, not against an
adversary, who could compute it too.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

WORD_BYTES = 8


@lru_cache(maxsize=8)
def constants(num_words: int) -> tuple[NDArray[np.uint64], np.uint64]:
    """Multipliers [num_words], and what a span of zeros folds to."""
    rng = np.random.Generator(np.random.PCG64(0x7A9DE3))
    limit = np.iinfo(np.uint64).max
    multipliers = rng.integers(0, limit, num_words, np.uint64, endpoint=True) | np.uint64(1)
    offsets = rng.integers(0, limit, num_words, np.uint64, endpoint=True)
    return multipliers, np.multiply(offsets, multipliers).sum(dtype=np.uint64)


def fingerprint_blocks(pool: NDArray[np.uint8], block_ids: list[int], kv_heads: int) -> NDArray[np.uint64]:
    """Fold blocks of a pool [num_blocks, block_bytes] to [len(block_ids), kv_heads].

    `block_bytes` must be a multiple of `kv_heads * 8`.
    """
    words = pool.view(np.uint64).reshape(pool.shape[0], kv_heads, -1)
    multipliers, zero = constants(words.shape[2])
    folded = np.empty((len(block_ids), kv_heads), np.uint64)
    for row, block in enumerate(block_ids):  # one block at a time: stays in the cache, needs no gather
        np.matmul(words[block], multipliers, out=folded[row])
    return folded + zero
