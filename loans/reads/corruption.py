"""Corruption of arriving blocks, for drills."""

import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BIT = 16
"""Flipped bit of a block's first byte."""


class PartMemory(Protocol):
    """This rank's parts of the pool's blocks."""

    def read_blocks(self, blocks: Sequence[int]) -> Iterable[NDArray[np.uint8]]:
        """Return this rank's part of blocks that no step writes."""

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        """Set this rank's part of a block; it is visible on return. From any thread."""


class Corruption:
    """Corruption of the next blocks that arrive: one bit of each is flipped before the block is verified.

    It takes place at the borrower. A lender that corrupted its own pool would compute further blocks from wrong KV and
    give them right fingerprints.
    """

    def __init__(self, memory: PartMemory, num_blocks: int) -> None:
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
