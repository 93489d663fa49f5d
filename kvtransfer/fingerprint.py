"""Fingerprints of block contents, per (block, kv_head), so that what arrives can be checked.

Each span is read as 64-bit words and folded to `sum((mixed(word_i) + i_th constant) * i_th odd multiplier) mod 2**64`,
where `mixed(word) = word ^ (word >> 32)`. The multipliers are products of two, one of them the same for every page of
words: a table of all would have to come through the cache beside the words.
The multipliers are odd and no two words mix to the same, so any change confined to one word changes the sum; changes
spread over words go unnoticed with probability about 2**-32 at most. That is what mixing is for: of a product the
topmost bits of a word reach the topmost bits of the sum only, where those of two words, such as a broken line of memory
changes, would cancel each other half of the time. It guards against mistakes of software and hardware, not against an
adversary, who could compute it too.
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
    """Of spans of some length. The multiplier of word i is page[i % PAGE_WORDS] * chunks[i // PAGE_WORDS]."""

    page: NDArray[np.uint64]
    chunks: NDArray[np.uint64]
    multipliers: NDArray[np.uint64]
    """[num_words]"""
    zero: np.uint64
    """What a span of zeros folds to."""


@lru_cache(maxsize=8)
def constants(num_words: int) -> Constants:
    """For spans of `num_words` words."""
    rng = np.random.Generator(np.random.PCG64(0x7A9DE3))
    num_chunks = -(-num_words // PAGE_WORDS)
    page, chunks = (_random(rng, count) | np.uint64(1) for count in (PAGE_WORDS, num_chunks))
    multipliers = np.outer(chunks, page).reshape(-1)[:num_words]
    zero = np.multiply(_random(rng, num_words), multipliers).sum(dtype=np.uint64)
    return Constants(page, chunks, multipliers, zero)


def _random(rng: np.random.Generator, count: int) -> NDArray[np.uint64]:
    return rng.integers(0, np.iinfo(np.uint64).max, count, np.uint64, endpoint=True)


class Folding:
    """How spans of `num_words` words are folded, by whoever sees them."""

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words
        self._constants = of = constants(num_words)
        self.arguments = (num_words, of.page.ctypes.data, PAGE_WORDS, of.chunks.ctypes.data, int(of.zero))
        """For native code; valid as long as this is."""

    def of(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """[..., num_words] to [...], by numpy."""
        folded: NDArray[np.uint64] = np.matmul(words ^ (words >> np.uint64(32)), self._constants.multipliers)
        return folded + self._constants.zero


class Fingerprints:
    """Of the blocks of one pool uint8 [num_blocks, block_bytes]; `block_bytes` must be a multiple of `kv_heads * 8`.

    From any thread. Holds no lock of the interpreter's while it reads, where there is a C++ compiler; without one numpy
    does it, several times slower.
    """

    def __init__(self, pool: NDArray[np.uint8], kv_heads: int) -> None:
        assert pool.flags.c_contiguous
        self._num_blocks = len(pool)
        self._words = pool.view(np.uint64).reshape(len(pool), kv_heads, -1)
        self.folding = Folding(self._words.shape[2])
        self._address = self._words.ctypes.data

    def of(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """[len(blocks), kv_heads]"""
        folded = np.empty((len(blocks), self._words.shape[1]), np.uint64)
        if (native := _native()) is None:
            for row, block in enumerate(blocks):  # one block at a time: stays in the cache, needs no gather
                folded[row] = self.folding.of(self._words[block])
            return folded
        ids = array("q", blocks)
        assert not ids or 0 <= min(ids) <= max(ids) < self._num_blocks
        heads = self._words.shape[1]
        native(self._address, ids.buffer_info()[0], len(ids), heads, *self.folding.arguments, folded.ctypes.data)
        return folded


def fingerprint_blocks(pool: NDArray[np.uint8], block_ids: Sequence[int], kv_heads: int) -> NDArray[np.uint64]:
    """Those of blocks of a pool, once: [len(block_ids), kv_heads]."""
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
