"""Whole blocks, put together from the parts that the ranks of an engine have of them.

Tiers and the shared store hold whole blocks, so their files and objects are the same for any number of ranks. A block
leaves the pool when every rank has copied its part into a row of shared memory; only then is it put anywhere.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from kvcache.rows import Allocate
from kvtransfer.ranks import BlockPart

ReadPart = Callable[[Sequence[int]], Iterable[NDArray[np.uint8]]]
"""Function that returns a rank's part of blocks."""
GATHER_BYTES = 8 << 20
"""Shared memory for blocks that are being gathered, if a block is smaller."""


class GatheringRank(ABC):
    """A follower rank that copies its parts of blocks into shared memory.

    Its methods belong to the main thread, and raise RankLost when it is gone.
    """

    @abstractmethod
    def begin_gather(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copy this rank's parts of `blocks` into `rows`, [len(blocks), block_bytes], from now on."""

    @abstractmethod
    def end_gather(self) -> None:
        """Wait until the parts are there."""


class FingerprintingRank(GatheringRank):
    """A rank that fingerprints its part of blocks on request.

    Both methods may be called on any thread.
    """

    @abstractmethod
    def begin_fingerprints(self, blocks: Sequence[int]) -> "Future[NDArray[np.uint64]]":
        """Start computing fingerprints of the rank's part of blocks that no step writes, [blocks, its KV heads]."""

    @abstractmethod
    def end_fingerprints(self, begun: "Future[NDArray[np.uint64]]") -> NDArray[np.uint64]:
        """Wait for fingerprints.

        Raises RankLost.
        """


class GatheredBlocks:
    """The engine process's reader of whole blocks."""

    def __init__(
        self,
        block_bytes: int,
        followers: Sequence[GatheringRank],
        allocate: Allocate,
        own: tuple[BlockPart, ReadPart] | None = None,
    ) -> None:
        """Create the reader of blocks of `block_bytes`.

        `own` is the part of this process and its reader; None where the followers have all parts. `allocate` returns
        memory that all ranks map.
        """
        self._own = own
        self._followers = followers
        self._rows = allocate(max(1, GATHER_BYTES // block_bytes), block_bytes)

    def read(self, blocks: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of blocks that no step writes, each valid until the next one is asked for.

        Raises RankLost.
        """
        for start in range(0, len(blocks), len(self._rows)):
            run = blocks[start : start + len(self._rows)]
            rows = self._rows[: len(run)]
            for follower in self._followers:
                follower.begin_gather(run, rows)
            if self._own is not None:
                part, read_part = self._own
                for row, content in zip(rows, read_part(run), strict=True):
                    part.put(content, row)
            for follower in self._followers:
                follower.end_gather()
            yield from rows
