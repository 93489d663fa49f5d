"""Corruption of arriving blocks, for drills."""

import threading
from collections.abc import Sequence

import numpy as np

from engine.kv.cached_blocks import BlockMemory

BIT = 16
"""Flipped bit of a block's first byte."""


class Corruption:
    """Corruption of the next blocks that arrive: one bit of each is flipped before the block is verified.

    It takes place at the borrower. A lender that corrupted its own pool would compute further blocks from wrong KV and
    give them right fingerprints.
    """

    def __init__(self, memory: BlockMemory, num_blocks: int) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._num_left = num_blocks

    @property
    def active(self) -> bool:
        return self._num_left > 0

    def strike(self, blocks: Sequence[int]) -> None:
        """Flip a bit in each of `blocks`, as far as the number allows; nothing else may read or write them.

        From any thread.
        """
        with self._lock:
            struck = blocks[: self._num_left]
            self._num_left -= len(struck)
        for block in struck:
            content = np.array(next(iter(self._memory.read_blocks([block]))))
            content.reshape(-1)[0] ^= BIT
            self._memory.write_block(block, content)
