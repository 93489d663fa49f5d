"""Fingerprints of blocks on a GPU, computed there.

The values equal those of `kvtransfer/fingerprint.py`.

torch's int64 arithmetic wraps around modulo 2**64 as numpy's uint64 does, and the sum of products has the same bits
under either sign.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.fingerprint import WORD_BYTES, constants

BLOCKS_AT_ONCE = 64
"""Blocks fingerprinted at a time, because the products are as large as the blocks."""


class TensorFingerprints:
    """Fingerprints of a pool's blocks, uint8 [num_blocks, block_bytes].

    Safe from any thread.

    On a GPU the computation has a stream of its own, so that blocks from a peer are checked while a step runs. The
    caller ensures that the blocks are written by then.
    """

    def __init__(self, pool: Tensor, kv_heads: int) -> None:
        head_words = pool.shape[1] // kv_heads // WORD_BYTES
        of = constants(head_words)
        self._words = pool.view(torch.int64).view(pool.shape[0], kv_heads, head_words)
        self._multipliers = torch.from_numpy(of.multipliers.view(np.int64).copy()).to(pool.device)
        self._zero = of.zero
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None  # type: ignore[no-untyped-call]
        if pool.is_cuda:
            torch.cuda.synchronize(pool.device)  # makes the multipliers visible to the other stream

    def of(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """Return the fingerprints, uint64 [len(blocks), kv_heads]."""
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
            halves[..., 0::2] ^= halves[..., 1::2]  # the lower half comes first
            folded[first : first + len(ids)] = words.mul_(self._multipliers).sum(-1)
        sums: NDArray[np.int64] = folded.cpu().numpy()
        return sums.view(np.uint64) + self._zero
