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
from typing import NamedTuple

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
    added: NDArray[np.uint64]
    """Constant that is added to each mixed word, [num_words]."""
    zero: np.uint64
    """Fingerprint of a span of zeros."""


class Cut(NamedTuple):
    """Part of a head's words, or of a block's planes, that a pipeline stage holds: from `first` on, of `of`."""

    first: int
    of: int


@lru_cache(maxsize=8)
def constants(num_words: int) -> Constants:
    """Return the constants for spans of `num_words` words."""
    rng = np.random.Generator(np.random.PCG64(0x7A9DE3))
    num_chunks = -(-num_words // PAGE_WORDS)
    page, chunks = (_random(rng, count) | np.uint64(1) for count in (PAGE_WORDS, num_chunks))
    multipliers = np.outer(chunks, page).reshape(-1)[:num_words]
    added = _random(rng, num_words)
    return Constants(page, chunks, multipliers, added, np.multiply(added, multipliers).sum(dtype=np.uint64))


def plane_multipliers(planes: int, cut: Cut | None = None) -> NDArray[np.uint64]:
    """Return the odd multiplier of the fingerprints of each plane, or of those in a `cut`, [planes]."""
    first, of = cut or Cut(0, planes)
    factors = _random(np.random.Generator(np.random.PCG64(0x51A9E5)), of) | np.uint64(1)
    return factors[first : first + planes]


def _random(rng: np.random.Generator, count: int) -> NDArray[np.uint64]:
    return rng.integers(0, np.iinfo(np.uint64).max, count, np.uint64, endpoint=True)


def words_of(num_words: int, first: int, of: int) -> tuple[NDArray[np.uint64], np.uint64]:
    """Return the multipliers of words [first, first + num_words) of a span of `of` words, and their part of its zero.

    Sums of the parts of a span so add up to the span's fingerprint.
    """
    whole = constants(of)
    if num_words == of:
        return whole.multipliers, whole.zero
    words = slice(first, first + num_words)
    multipliers = np.ascontiguousarray(whole.multipliers[words])
    return multipliers, np.multiply(whole.added[words], multipliers).sum(dtype=np.uint64)


class Folding:
    """Fold of spans of `num_words` words, for any code that reads the bytes."""

    def __init__(self, num_words: int, first: int = 0, of: int | None = None) -> None:
        """Create it; the words are those from `first` on of a longer span of `of` words, if that is given."""
        self.num_words = num_words
        of = of or num_words
        self._multipliers, self._zero = words_of(num_words, first, of)
        self._tables = constants(of).page, constants(of).chunks[first // PAGE_WORDS :]
        if first % PAGE_WORDS:  # the pages of the longer span are not those of its part
            self._tables = np.ones(1, np.uint64), self._multipliers
        page, chunks = self._tables
        self.arguments = (num_words, page.ctypes.data, len(page), chunks.ctypes.data, int(self._zero))
        """Arguments for native code, valid as long as this object exists."""

    def of(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Fold [..., num_words] to [...] by numpy."""
        folded: NDArray[np.uint64] = np.matmul(words ^ (words >> np.uint64(32)), self._multipliers)
        return folded + self._zero


class Fingerprints:
    """Fingerprints of the blocks of one pool, uint8 [num_blocks, block_bytes].

    `block_bytes` must be a multiple of `kv_heads * 8`. May be called from any thread. The compiled loop releases the
    GIL; without a C++ compiler numpy computes them, several times slower.
    """

    def __init__(self, pool: NDArray[np.uint8], kv_heads: int, cut: "Cut | None" = None) -> None:
        """Create it; the pool has the `cut` of each head."""
        assert pool.flags.c_contiguous
        self._num_blocks = len(pool)
        self._words = pool.view(np.uint64).reshape(len(pool), kv_heads, -1)
        self.folding = Folding(self._words.shape[2], *((cut.first, cut.of) if cut is not None else ()))
        self._address = self._words.ctypes.data

    def of(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """Return the fingerprints of `blocks`, [len(blocks), kv_heads]."""
        folded = np.empty((len(blocks), self._words.shape[1]), np.uint64)
        if (native := compiled()) is None:
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

    def __init__(
        self, pool: NDArray[np.uint8], num_blocks: int, planes: int, kv_heads: int, cut: "Cut | None" = None
    ) -> None:
        """Create it for a contiguous uint8 pool [planes, num_blocks, span_bytes] of any shape.

        Its planes are the `cut` of those of a whole block.
        """
        flat = pool.reshape(planes, num_blocks, -1)
        self._multipliers = plane_multipliers(planes, cut)
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
def compiled() -> Callable[..., None] | None:
    """Return the compiled loop; None without a compiler."""
    try:
        function = load_library(Path(__file__).with_name("native") / "fingerprint.cpp").tandem_fingerprint
    except NotCompiled as error:
        log.warning("fingerprints are computed by numpy, several times slower: %s", error)
        return None
    pointer, long = ctypes.c_void_p, ctypes.c_long
    function.argtypes = [pointer, pointer, *3 * [long], pointer, long, pointer, ctypes.c_uint64, pointer]
    function.restype = None
    return function
