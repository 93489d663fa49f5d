"""Reads of a loan, and who performs them: one rank of the engine, or each of several."""

import functools
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import CancelledError, Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.errors import PeerGone, TransferError
from kvtransfer.fingerprint import Folding
from kvtransfer.ranks import BlockPart, part_spans, parts_of, split_endpoint
from kvtransfer.transport import Found, Peer, Read, Transport

MAX_PEERS = 1024
"""Workers that a rank stays connected to. Nobody tells it of one that departs while nothing is read from it: that is
forgotten when so many others were read from since."""
OnQuiet = Callable[[tuple[bytes, ...] | None, bool], None]
"""on_quiet(fingerprints of what arrived, one entry per block, or None when it did not all arrive; peer_gone). Called
once, on whatever thread."""
TransferRead = Read | Future[None]
"""By a transport, or from a tier."""
ReadRun = Callable[[Seq[int], Seq[int]], Seq[TransferRead]]
"""read(block_ids, blocks): the reads that bring the one into the other."""
Peers = list[tuple[BlockPart, Peer, "ReadProgress"]]
"""Ranks of another worker, what each holds of a block, and how reads of it get on."""


class RankRead(Protocol):
    """What a machine calls one read, on one rank."""

    def withdraw(self) -> list[int]:
        """Cancel what can be; the blocks that are still being written. It is over when `on_quiet` was called."""

    def stuck_s(self) -> float:
        """For how long nothing has come from where it reads, in seconds; 0 when it is quiet."""


class ReadProgress:
    """How the reads of one origin get on. To a transport, one that hangs is as one that takes long; and those that wait
    behind it hang as well, so what counts is when any of them last ended. From any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_reading = 0
        self._moved_at = 0.0

    def follow(self, read: TransferRead) -> None:
        """One more is queued or posted."""
        with self._lock:
            if not self._num_reading:
                self._moved_at = self._clock()
            self._num_reading += 1
        read.add_done_callback(self._ended)

    def stuck_s(self) -> float:
        """For how long none has ended; 0 when nothing is read."""
        with self._lock:
            return self._clock() - self._moved_at if self._num_reading else 0.0

    def _ended(self, read: TransferRead) -> None:
        with self._lock:
            self._num_reading -= 1
            if not read.cancelled():
                self._moved_at = self._clock()


class BlockRead:
    """Several reads and one message to the loop, for which they would be many to wake for. What a read brought is
    checked when it is there, if the transport did not fingerprint it on the way.

    Reads end on whatever thread; the last to be quiet says so, once, by `on_quiet`.
    """

    def __init__(
        self,
        fingerprints_of: Callable[[Seq[int]], tuple[bytes, ...]],
        on_quiet: OnQuiet,
        origins: Seq[ReadProgress] = (),
    ) -> None:
        """`fingerprints_of` blocks: one entry for each. `origins`: of all that is read from."""
        self._fingerprints_of = fingerprints_of
        self._origins = origins
        self._on_quiet = on_quiet
        self._pieces: list[_Piece] = []
        self._lock = threading.Lock()
        self._num_reading = 0
        self._peer_gone = False

    def follow(self, pieces: Seq[tuple[Seq[int], Seq[TransferRead]]]) -> None:
        """Runs of blocks, and the reads that fill each; all of them together."""
        self._pieces = [_Piece(blocks, list(reads), len(reads)) for blocks, reads in pieces]
        self._num_reading = len(self._pieces)
        for piece in self._pieces:
            for read in piece.reads:
                read.add_done_callback(functools.partial(self._quiet, piece))

    @property
    def is_quiet(self) -> bool:
        """Nothing is read any more."""
        return self._num_reading == 0

    def stuck_s(self) -> float:
        return 0.0 if self.is_quiet else max((origin.stuck_s() for origin in self._origins), default=0.0)

    def withdraw(self) -> list[int]:
        writing = list[int]()
        for piece in self._pieces:
            cancelled = [read.cancel() or read.done() for read in piece.reads]  # every one of them is tried
            if not all(cancelled):
                writing += piece.blocks
        return writing

    def _quiet(self, piece: "_Piece", done: TransferRead) -> None:
        failure = CancelledError() if done.cancelled() else done.exception()
        with self._lock:
            piece.num_reading -= 1
            piece.failed |= failure is not None
            piece.found = None if failure is not None else done.result()
            self._peer_gone |= isinstance(failure, PeerGone)
            if piece.num_reading:
                return
            piece.reads.clear()  # they hold this, as what they call: it would be freed by a collection of cycles only
        if not piece.failed:
            if piece.found is not None:
                piece.arrived = entries(piece.found.reshape(len(piece.blocks), -1))
            else:
                piece.arrived = self._fingerprints_of(piece.blocks)  # now, while it is in this core's cache
        with self._lock:
            self._num_reading -= 1
            if self._num_reading:
                return
        whole = not any(piece.failed for piece in self._pieces)
        arrived = tuple(entry for piece in self._pieces for entry in piece.arrived)
        self._on_quiet(arrived if whole else None, self._peer_gone)


class _Piece:
    """A run of blocks of a landing."""

    __slots__ = ("arrived", "blocks", "failed", "found", "num_reading", "reads")

    def __init__(self, blocks: Seq[int], reads: list[TransferRead], num_reading: int) -> None:
        self.blocks, self.reads, self.num_reading = blocks, reads, num_reading
        self.failed = False
        self.found: Found = None
        """By the one read that brought it, if it looked."""
        self.arrived: tuple[bytes, ...] = ()


class Rank(ABC):
    """One rank of this engine, as its borrowing desk sees it. It reads its part of each block into its own pool."""

    @abstractmethod
    def start_read(
        self, endpoint: bytes, block_ids: Seq[int], blocks: Seq[int], flow: str, on_quiet: OnQuiet
    ) -> RankRead:
        """Read this rank's part of the `block_ids` of the worker with that endpoint into the same part of `blocks`.
        Never raises: what cannot be read comes quiet, failed. Reads of one `flow` take turns with others'."""

    @abstractmethod
    def drop(self, endpoint: bytes) -> None:
        """That worker has departed: forget it."""


class RemoteRank(Rank):
    """One whose process is another."""

    endpoint: bytes
    """Of its part of the pool, for those who borrow."""


class LocalRank(Rank):
    """The rank whose process this is."""

    def __init__(
        self,
        transport: Transport,
        part: BlockPart,
        fingerprints: Callable[[Seq[int]], NDArray[np.uint64]],
        folding: Folding | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fingerprints` of blocks: [blocks, this rank's KV heads], made by `folding` if the transport may make them.
        It has registered this rank's pool when anything lands. `clock` says the time, in seconds."""
        self._clock = clock
        self._transport = transport
        self._part = part
        self._fingerprints = fingerprints
        self._folding = folding
        self._read_blocks = transport.blocks_per_read(part.num_bytes)
        self._peers: OrderedDict[bytes, Peers] = OrderedDict()
        """By endpoint, the one that was used last at the end."""

    def connect(self, endpoint: bytes) -> Peers:
        """The ranks of that worker that have something of this rank's part, which is all of it for one rank. Raises
        TransferError."""
        if (known := self._peers.get(endpoint)) is not None:
            self._peers.move_to_end(endpoint)
            return known
        endpoints = split_endpoint(endpoint)
        theirs = parts_of(self._part.block_bytes, len(endpoints))
        peers = self._peers[endpoint] = [
            (part, self._transport.connect(own), ReadProgress(self._clock))
            for part, own in zip(theirs, endpoints, strict=True)
            if part_spans(self._part, part, [(0, 0)])
        ]
        while len(self._peers) > MAX_PEERS:
            self.drop(next(iter(self._peers)))
        return peers

    def start_read(
        self, endpoint: bytes, block_ids: Seq[int], blocks: Seq[int], flow: str, on_quiet: OnQuiet
    ) -> BlockRead:
        peers: Peers = []
        failure: TransferError | None = None
        try:
            peers = self.connect(endpoint)
        except TransferError as error:
            failure = error

        def read(block_ids: Seq[int], blocks: Seq[int]) -> Seq[TransferRead]:
            return [failed_read(failure)] if failure else self._read(peers, block_ids, blocks, flow)

        run = self._transport.blocks_per_read(self._part.num_bytes, peers[0][1]) if len(peers) == 1 else None
        return self.follow(read, block_ids, blocks, on_quiet, [origin for _, _, origin in peers], run)

    def follow(
        self,
        read: ReadRun,
        block_ids: Seq[int],
        blocks: Seq[int],
        on_quiet: OnQuiet,
        origins: Seq[ReadProgress],
        run_blocks: int | None = None,
    ) -> BlockRead:
        """Land `block_ids` in `blocks` by reads of whatever kind, a run of so many at a time, each checked when it is
        there. `read` has `origins` follow what it reads."""
        block_read = BlockRead(self._fingerprints_of, on_quiet, origins)
        step = run_blocks or self._read_blocks
        runs = [slice(at, at + step) for at in range(0, len(blocks), step)]
        block_read.follow([(blocks[run], read(block_ids[run], blocks[run])) for run in runs])
        return block_read

    def drop(self, endpoint: bytes) -> None:
        for _, peer, _ in self._peers.pop(endpoint, []):
            self._transport.drop(peer)

    def _read(self, peers: Peers, block_ids: Seq[int], blocks: Seq[int], flow: str) -> list[Read]:
        reads: list[Read] = []
        folding = self._folding if len(peers) == 1 else None  # of several, each brings pieces of blocks
        for theirs, peer, progress in peers:
            spans = part_spans(self._part, theirs, zip(blocks, block_ids, strict=True))
            try:
                read = self._transport.read(peer, spans, flow, folding)
                progress.follow(read)
                reads.append(read)
            except ValueError:  # the lender announced a block that its pool does not have
                reads.append(failed_read(TransferError("announced blocks lie outside the lender's pool")))
        return reads

    def _fingerprints_of(self, blocks: Seq[int]) -> tuple[bytes, ...]:
        return entries(self._fingerprints(blocks))


def entries(fingerprints: NDArray[np.uint64]) -> tuple[bytes, ...]:
    """One for each block of [blocks, KV heads]."""
    joined, width = fingerprints.tobytes(), fingerprints.shape[1] * fingerprints.itemsize
    return tuple(joined[at : at + width] for at in range(0, len(joined), width))


def lanes_of(peers: Peers) -> tuple[str, ...]:
    """What was read from them travelled over, also when they have departed; empty before the first read."""
    return tuple(dict.fromkeys(lane for _, peer, _ in peers for lane in peer.lanes))


def failed_read(error: TransferError) -> Read:
    """One that came quiet at once."""
    future = Read()
    future.set_exception(error)
    return future
