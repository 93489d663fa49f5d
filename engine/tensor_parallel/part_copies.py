"""A follower's copies between its part of the pool and whole blocks, in shared memory or in the disk tier's file."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.lending.reads.block_reads import BlockRead, LocalRank, OnQuiet, ReadProgress
from engine.lending.reads.corruption import PartMemory
from engine.tensor_parallel.shared_memory import MappedMemory, SharedPlace
from kvtransfer.errors import TransferError
from kvtransfer.ranks import BlockPart

log = logging.getLogger(__name__)


class PartCopies:
    """Copies of one follower.

    Its methods belong to the main thread. Copies into the pool happen on two threads, so that a disk that hangs does
    not hold up copies from memory.
    """

    def __init__(
        self,
        part: BlockPart,
        pool: PartMemory,
        memory: MappedMemory | None,
        rank: LocalRank,
        executors: tuple[Executor, Executor] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create them; without `memory`, that of rank 0, its bytes come in messages.

        `executors` replace the threads that copy from memory and from disk.
        """
        self._part = part
        self.pool = pool
        self._memory = memory
        self._rank = rank
        self._disk: int | None = None
        self._threads = executors or (ThreadPoolExecutor(1, "rank-memory"), ThreadPoolExecutor(1, "rank-disk"))
        self._progress = ReadProgress(clock), ReadProgress(clock)

    def open_disk(self, path: Path) -> None:
        """Open the disk tier's file, which rank 0 has locked.

        Raises TransferError.
        """
        try:
            self._disk = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise TransferError(f"{path}: {error.strerror}") from error

    def parts(self, blocks: Sequence[int]) -> tuple[bytes, ...]:
        """Return this rank's parts of `blocks`."""
        return tuple(content.tobytes() for content in self.pool.read_blocks(blocks))

    def gather(self, blocks: Sequence[int], offset: int) -> None:
        """Copy this rank's parts of `blocks` into rows of shared memory, one after the other from `offset` on."""
        width = self._part.block_bytes
        assert self._memory is not None
        for index, content in enumerate(self.pool.read_blocks(blocks)):
            self._part.put(content, self._memory.row(offset + index * width, width))

    def start(self, places: Sequence[SharedPlace | bytes], blocks: Sequence[int], on_quiet: OnQuiet) -> BlockRead:
        """Start copying this rank's part of the blocks at `places` into `blocks`."""

        def read(indices: Sequence[int], blocks: Sequence[int]) -> "list[Future[None]]":
            run = [places[index] for index in indices]
            from_disk = any(map(_is_on_disk, run))
            copying = self._threads[from_disk].submit(self._copy, run, blocks)
            self._progress[from_disk].follow(copying)
            return [copying]

        origins = [self._progress[from_disk] for from_disk in set(map(_is_on_disk, places))]
        return self._rank.follow(read, range(len(places)), blocks, on_quiet, origins)

    def _copy(self, places: Sequence[SharedPlace | bytes], blocks: Sequence[int]) -> None:
        """Copy parts, on a thread of this object; an exception makes the read fail."""
        try:
            for place, block in zip(places, blocks, strict=True):
                self.pool.write_block(block, self._part_at(place))
        except TransferError as error:
            log.warning("%s", error)
            raise
        except Exception:
            log.exception("blocks could not be copied into the pool")
            raise

    def _part_at(self, place: SharedPlace | bytes) -> NDArray[np.uint8]:
        if isinstance(place, bytes):
            return np.frombuffer(place, np.uint8)
        if not place.on_disk:
            assert self._memory is not None
            return self._part.of(self._memory.row(place.offset, self._part.block_bytes))
        assert self._disk is not None
        assert self._part.planes == 1
        content = np.empty(self._part.num_bytes, np.uint8)
        left, offset = content.data, place.offset + self._part.start
        while left:
            try:
                count = os.preadv(self._disk, [left], offset)
            except OSError as error:
                raise TransferError(f"the disk tier cannot be read: {error.strerror}") from error
            if count == 0:
                raise TransferError(f"the disk tier's file ends before offset {offset}")
            left, offset = left[count:], offset + count
        return content


def _is_on_disk(place: SharedPlace | bytes) -> bool:
    return isinstance(place, SharedPlace) and place.on_disk
