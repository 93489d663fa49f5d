"""Fingerprints of block contents, per (block, kv_head), so that what arrives can be checked.

Each span is read as 64-bit words and folded to `sum((word_i + i_th constant) * i_th odd multiplier) mod 2**64`. The
multipliers are products of two, one of them the same for every page of words: a table of all would have to come through
the cache beside the words.
The multipliers are odd, so any change confined to one word changes the sum; changes spread over words go
unnoticed with probability about 2**-63. It guards against mistakes of software and hardware, not against an
adversary, who could compute it too.
"""

import ctypes
import logging
from collections.abc import Callable
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


def fingerprint_blocks(pool: NDArray[np.uint8], block_ids: list[int], kv_heads: int) -> NDArray[np.uint64]:
    """Fold blocks of a pool [num_blocks, block_bytes] to [len(block_ids), kv_heads].

    `block_bytes` must be a multiple of `kv_heads * 8`. Holds no lock of the interpreter's while it reads, where there
    is a C++ compiler; without one numpy does it, several times slower.
    """
    words = pool.view(np.uint64).reshape(pool.shape[0], kv_heads, -1)
    of = constants(words.shape[2])
    folded = np.empty((len(block_ids), kv_heads), np.uint64)
    if (native := _native()) is None:
        for row, block in enumerate(block_ids):  # one block at a time: stays in the cache, needs no gather
            np.matmul(words[block], of.multipliers, out=folded[row])
        return folded + of.zero
    ids = np.array(block_ids, np.int64)
    assert not len(ids) or 0 <= ids.min() <= ids.max() < len(pool)
    assert words.flags.c_contiguous
    native(
        *(words.ctypes.data, ids.ctypes.data, len(ids), kv_heads, words.shape[2]),
        *(of.page.ctypes.data, PAGE_WORDS, of.chunks.ctypes.data, int(of.zero), folded.ctypes.data),
    )
    return folded


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
