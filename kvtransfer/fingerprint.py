"""Fingerprints of block contents, per (block, kv_head), to verify blocks that arrive.

Each span is read as 64-bit words and folded to `sum((mixed(word_i) + i_th constant) * i_th odd multiplier) mod 2**64`,
where `mixed(word) = word ^ (word >> 32)`. A multiplier is a product of two, one of them equal for every page of words:
a full table would need as much cache as the words.

Multipliers are odd and `mixed` is a bijection, so any change within one word changes the sum. Changes over several
words go unnoticed with probability about 2**-32 at most. Mixing is for this: without it the top bits of a word would
reach only the top bits of the sum, where changes of two words, such as a broken memory line causes, cancel each other
half of the time.

Fingerprints detect mistakes of software and hardware. They are no protection against an adversary, who can compute
them.
"""

import ctypes
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtransfer.native.compiler import NotCompiled, load_library

WORD_BYTES = 8
PAGE_WORDS = 512
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants for spans of one length.

    The multiplier of word i is page[i % PAGE_WORDS] * chunks[i // PAGE_WORDS].
    """

    page: NDArray[np.uint64]
    chunks: NDArray[np.uint64]
    multipliers: NDArray[np.uint64]
    """Multiplier of each word, [num_words]."""
    zero: np.uint64
    """Fingerprint of a span of zeros."""


@lru_cache(maxsize=8)
def constants(num_words: int) -> Constants:
    """Return the constants for spans of `num_words` words."""
    rng = np.random.Generator(np.random.PCG64(0x7A9DE3))
    num_chunks = -(-num_words // PAGE_WORDS)
    page, chunks = (_random(rng, count) | np.uint64(1) for count in (PAGE_WORDS, num_chunks))
    multipliers = np.outer(chunks, page).reshape(-1)[:num_words]
    zero = np.multiply(_random(rng, num_words), multipliers).sum(dtype=np.uint64)
    return Constants(page, chunks, multipliers, zero)


def plane_multipliers(planes: int) -> NDArray[np.uint64]:
    """Return the odd multiplier of each plane's fingerprints, [planes]."""
    return _random(np.random.Generator(np.random.PCG64(0x51A9E5)), planes) | np.uint64(1)


def _random(rng: np.random.Generator, count: int) -> NDArray[np.uint64]:
    return rng.integers(0, np.iinfo(np.uint64).max, count, np.uint64, endpoint=True)


class Folding:
    """Fold of spans of `num_words` words, for any code that reads the bytes."""

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words
        self._constants = of = constants(num_words)
        self.arguments = (num_words, of.page.ctypes.data, PAGE_WORDS, of.chunks.ctypes.data, int(of.zero))
        """Arguments for native code, valid as long as this object exists."""

    def of(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Fold [..., num_words] to [...] by numpy."""
        folded: NDArray[np.uint64] = np.matmul(words ^ (words >> np.uint64(32)), self._constants.multipliers)
        return folded + self._constants.zero


class Fingerprints:
    """Fingerprints of the blocks of one pool, uint8 [num_blocks, block_bytes].

    `block_bytes` must be a multiple of `kv_heads * 8`. May be called from any thread. The compiled loop releases the
    GIL; without a C++ compiler numpy computes them, several times slower.
    """

    def __init__(self, pool: NDArray[np.uint8], kv_heads: int) -> None:
        assert pool.flags.c_contiguous
        self._num_blocks = len(pool)
        self._words = pool.view(np.uint64).reshape(len(pool), kv_heads, -1)
        self.folding = Folding(self._words.shape[2])
        self._address = self._words.ctypes.data

    def of(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """Return the fingerprints of `blocks`, [len(blocks), kv_heads]."""
        folded = np.empty((len(blocks), self._words.shape[1]), np.uint64)
        if (native := _native()) is None:
            for row, block in enumerate(blocks):  # one block at a time stays in the cache and needs no gather
                folded[row] = self.folding.of(self._words[block])
            return folded
        ids = array("q", blocks)
        assert not ids or 0 <= min(ids) <= max(ids) < self._num_blocks
        heads = self._words.shape[1]
        native(self._address, ids.buffer_info()[0], len(ids), heads, *self.folding.arguments, folded.ctypes.data)
        return folded


class PlaneFingerprints:
    """Fingerprints of the blocks of a pool of several planes, see `kvtransfer/ranks.py`.

    A block's fingerprint is the sum of those of its spans, each times an odd multiplier of its plane. So it changes
    with every change of one span, and exchanged spans do not cancel each other.
    """

    def __init__(self, pool: NDArray[np.uint8], num_blocks: int, planes: int, kv_heads: int) -> None:
        """Create it for a contiguous uint8 pool [planes, num_blocks, span_bytes] of any shape."""
        flat = pool.reshape(planes, num_blocks, -1)
        self._multipliers = plane_multipliers(planes)
        self._kv_heads = kv_heads
        self._planes = [Fingerprints(plane, kv_heads) for plane in flat]

    def of(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """Return the fingerprints of `blocks`, [len(blocks), kv_heads]."""
        total = np.zeros((len(blocks), self._kv_heads), np.uint64)
        for plane, multiplier in zip(self._planes, self._multipliers, strict=True):
            total += plane.of(blocks) * multiplier
        return total


def fingerprint_blocks(pool: NDArray[np.uint8], block_ids: Sequence[int], kv_heads: int) -> NDArray[np.uint64]:
    """Return the fingerprints of some blocks of a pool, [len(block_ids), kv_heads]."""
    return Fingerprints(pool, kv_heads).of(block_ids)


@cache
def _native() -> Callable[..., None] | None:
    try:
        function = load_library(Path(__file__).with_name("native") / "fingerprint.cpp").tandem_fingerprint
    except NotCompiled as error:
        log.warning("fingerprints are computed by numpy, several times slower: %s", error)
        return None
    pointer, long = ctypes.c_void_p, ctypes.c_long
    function.argtypes = [pointer, pointer, *3 * [long], pointer, long, pointer, ctypes.c_uint64, pointer]
    function.restype = None
    return function
