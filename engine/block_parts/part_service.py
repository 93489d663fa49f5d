"""Service of one rank's part of every block, for the engine process at the other end of a connection.

A rank's copies between its part of the pool and whole blocks, in shared memory or in messages.

Memory of rank 0 that its followers map: whole blocks, of which each rank reads and writes its part.

The memory is an unnamed file whose descriptor the followers inherit. It only grows, so no mapping loses pages.
"""

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from engine.block_parts.messages import (
    HEARTBEAT_S,
    BlocksRead,
    CopyBlocks,
    Corrupt,
    Drop,
    Fingerprint,
    Fingerprinted,
    FromFollower,
    Gather,
    Heartbeat,
    RankReply,
    ReadBlocks,
    Withdraw,
)
from kvtransfer.hardware.main_memory import check_fits
from kvtransfer.ranks import BlockPart
from loans.reads.block_reads import BlockRead, LocalRank, OnQuiet, ReadProgress
from loans.reads.verification import Corruption, PartMemory

log = logging.getLogger(__name__)


class SharedMemory:
    """Rank 0's end: allocates rows, and knows the offset of each."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC)
        self._num_bytes = 0
        self._areas: list[tuple[int, int, int]] = []
        """Address, length and offset of each allocation."""

    def take(self, count: int, row_bytes: int) -> NDArray[np.uint8]:
        """Allocate zeroed rows, uint8 [count, row_bytes]; they are never given back.

        Pages are allocated at their first write. Raises MemoryError.
        """
        length = -(-count * row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            check_fits(length)
            # A file may be larger than what a system that does not overcommit gives: so allocate as much otherwise.
            mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
            os.ftruncate(self.descriptor, self._num_bytes + length)
            mapped = mmap.mmap(self.descriptor, length, offset=self._num_bytes)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(str(error)) from None
        rows = np.frombuffer(mapped, np.uint8)[: count * row_bytes].reshape(count, row_bytes)
        self._areas.append((rows.ctypes.data, length, self._num_bytes))
        self._num_bytes += length
        return rows

    def offset_of(self, row: NDArray[np.uint8]) -> int:
        """Return the offset in the file of a row, or of a part of one, that lies in this memory."""
        address = row.ctypes.data
        for begin, length, offset in self._areas:
            if begin <= address < begin + length:
                return int(offset + address - begin)
        raise AssertionError("the row does not lie in shared memory")


class MappedMemory:
    """A follower's end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = np.empty(0, np.uint8)

    def row(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return the bytes from `offset` on, which rank 0 has allocated.

        From any thread. Raises MemoryError.
        """
        memory = self._memory
        if offset + num_bytes > len(memory):  # rank 0 has allocated more since
            try:
                mapped = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
            except OSError as error:
                raise MemoryError(str(error)) from None
            self._memory = memory = np.frombuffer(mapped, np.uint8)
        row = memory[offset : offset + num_bytes]
        assert len(row) == num_bytes
        return row


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


FingerprintBlocks = Callable[[Sequence[int]], NDArray[np.uint64]]
"""Function that returns fingerprints of this rank's part of blocks, [blocks, its KV heads]. From any thread."""


class EngineLink:
    """The engine process as this rank sees it.

    Any thread may send.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, message: FromFollower) -> None:
        """Send a message; end this process if the engine process is gone."""
        try:
            with self._lock:
                self.connection.send(message)
        except OSError:
            os._exit(0)


def serve_part(
    engine: EngineLink,
    rank: LocalRank,
    copies: PartCopies,
    fingerprints: FingerprintBlocks,
    settle: Callable[[], None] = lambda: None,
) -> None:
    """Serve the engine process until it is gone.

    `settle` returns when all is written that steps write after their results. Raises EOFError or OSError at the end.
    """
    block_reads: dict[int, BlockRead] = {}
    hashing = ThreadPoolExecutor(1, "rank-fingerprints")

    def begin(number: int, start: Callable[[OnQuiet], BlockRead], endpoint: bytes = b"") -> None:
        block_read = block_reads[number] = start(partial(quiet, number, endpoint))
        if block_read.is_quiet:  # it may have been quiet before it was recorded
            block_reads.pop(number, None)

    def quiet(number: int, endpoint: bytes, fingerprints: tuple[bytes, ...] | None, peer_gone: bool) -> None:
        block_reads.pop(number, None)
        engine.send(BlocksRead(number, fingerprints, peer_gone, rank.lanes_used(endpoint)))

    def fingerprint(number: int, blocks: Sequence[int]) -> None:
        try:
            settle()
            engine.send(Fingerprinted(number, fingerprints(blocks)))
        except BaseException:
            log.exception("blocks cannot be fingerprinted")
            os._exit(1)  # nobody reads the future of this call

    heartbeat_at = time.monotonic()
    while True:
        if (now := time.monotonic()) >= heartbeat_at:
            stuck_s = {number: block_read.stuck_s() for number, block_read in list(block_reads.items())}
            engine.send(Heartbeat({number: seconds for number, seconds in stuck_s.items() if seconds >= HEARTBEAT_S}))
            heartbeat_at = now + HEARTBEAT_S
        if not engine.connection.poll(heartbeat_at - now):
            continue
        match engine.connection.recv():
            case ReadBlocks(number, endpoint, block_ids, blocks, flow):
                settle()
                begin(number, partial(rank.start_read, endpoint, block_ids, blocks, flow), endpoint)
            case CopyBlocks(number, places, blocks):
                settle()
                begin(number, partial(copies.start, places, blocks))
            case Fingerprint(number, blocks):
                hashing.submit(fingerprint, number, blocks)
            case Gather(blocks, None):
                engine.send(RankReply(contents=copies.parts(blocks)))
            case Gather(blocks, int(offset)):
                copies.gather(blocks, offset)
                engine.send(RankReply())
            case Withdraw(number):
                pending_read = block_reads.get(number)
                engine.send(RankReply(tuple(pending_read.withdraw()) if pending_read is not None else ()))
            case Drop(endpoint):
                rank.drop(endpoint)
            case Corrupt(num_blocks):
                rank.corruption = Corruption(copies.pool, num_blocks)
