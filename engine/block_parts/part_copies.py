"""A rank's copies between its part of the pool and whole blocks, in shared memory or in messages."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from engine.block_parts.shared_memory import MappedMemory
from kvtransfer.ranks import BlockPart
from loans.reads.block_reads import BlockRead, LocalRank, OnQuiet, ReadProgress
from loans.reads.corruption import PartMemory

log = logging.getLogger(__name__)


class PartCopies:
    """Copies of one rank.

    Its methods belong to the main thread. Copies into the pool happen on a thread beside it.
    """

    def __init__(
        self,
        part: BlockPart,
        pool: PartMemory,
        memory: MappedMemory | None,
        rank: LocalRank,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create them; without `memory`, that of rank 0, its bytes come in messages.

        `executor` replaces the thread that copies.
        """
        self._part = part
        self.pool = pool
        self._memory = memory
        self._rank = rank
        self._thread = executor or ThreadPoolExecutor(1, "rank-copies")
        self._progress = ReadProgress(clock)

    def parts(self, blocks: Sequence[int]) -> tuple[bytes, ...]:
        """Return this rank's parts of `blocks`."""
        return tuple(content.tobytes() for content in self.pool.read_blocks(blocks))

    def gather(self, blocks: Sequence[int], offset: int) -> None:
        """Copy this rank's parts of `blocks` into rows of shared memory, one after the other from `offset` on."""
        width = self._part.block_bytes
        assert self._memory is not None
        for index, content in enumerate(self.pool.read_blocks(blocks)):
            self._part.put(content, self._memory.row(offset + index * width, width))

    def start(self, sources: Sequence[int | bytes], blocks: Sequence[int], on_quiet: OnQuiet) -> BlockRead:
        """Start copying this rank's part of whole blocks into `blocks`, from offsets in shared memory or from bytes."""

        def read(indices: Sequence[int], blocks: Sequence[int]) -> "list[Future[None]]":
            copying = self._thread.submit(self._copy, [sources[index] for index in indices], blocks)
            self._progress.follow(copying)
            return [copying]

        return self._rank.follow(read, range(len(sources)), blocks, on_quiet, [self._progress])

    def _copy(self, sources: Sequence[int | bytes], blocks: Sequence[int]) -> None:
        """Copy parts, on a thread of this object; an exception makes the read fail."""
        try:
            for source, block in zip(sources, blocks, strict=True):
                self.pool.write_block(block, self._part_of(source))
        except Exception:
            log.exception("blocks could not be copied into the pool")
            raise

    def _part_of(self, source: int | bytes) -> NDArray[np.uint8]:
        if isinstance(source, bytes):
            return np.frombuffer(source, np.uint8)
        assert self._memory is not None
        return self._part.of(self._memory.row(source, self._part.block_bytes))
