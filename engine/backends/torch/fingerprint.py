"""Fingerprints of blocks that lie on a GPU, computed there: the values of `kvtransfer/fingerprint.py`.

torch's int64 arithmetic wraps around modulo 2**64 just as numpy's uint64 does, and the sum of products is the same bits
whichever sign they are read with.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.fingerprint import WORD_BYTES, constants

BLOCKS_AT_ONCE = 64
"""The products are as large as the blocks: so many at a time."""


class TensorFingerprints:
    """Of a pool uint8 [num_blocks, block_bytes]. On a GPU it has a stream of its own, so that what has arrived from a
    peer is checked while a step runs; the blocks asked for must be written by then. Safe from any thread."""

    def __init__(self, pool: Tensor, kv_heads: int) -> None:
        head_words = pool.shape[1] // kv_heads // WORD_BYTES
        of = constants(head_words)
        self._words = pool.view(torch.int64).view(pool.shape[0], kv_heads, head_words)
        self._multipliers = torch.from_numpy(of.multipliers.view(np.int64).copy()).to(pool.device)
        self._zero = of.zero
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None  # type: ignore[no-untyped-call]
        if pool.is_cuda:
            torch.cuda.synchronize(pool.device)  # the multipliers are there for the other stream

    def of(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """[len(blocks), kv_heads]"""
        if self._stream is None:
            return self._fold(blocks)
        with torch.cuda.stream(self._stream):
            return self._fold(blocks)

    def _fold(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        folded = torch.empty(len(blocks), self._words.shape[1], dtype=torch.int64, device=self._words.device)
        for first in range(0, len(blocks), BLOCKS_AT_ONCE):
            ids = torch.tensor(blocks[first : first + BLOCKS_AT_ONCE], device=self._words.device)
            words = self._words[ids]
            halves = words.view(torch.int32)
            halves[..., 0::2] ^= halves[..., 1::2]  # the lower half is the first
            folded[first : first + len(ids)] = words.mul_(self._multipliers).sum(-1)
        sums: NDArray[np.int64] = folded.cpu().numpy()
        return sums.view(np.uint64) + self._zero
