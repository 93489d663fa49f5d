"""Reads of a loan's blocks, performed by one rank of the engine or by each of several."""

import functools
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.errors import EndpointMismatch, PeerGone, TransferError
from kvtransfer.fingerprint import Folding
from kvtransfer.ranks import BlockPart, part_spans, parts_of, split_endpoint, without_planes, without_stages
from kvtransfer.transport import Found, Peer, Read, Transport
from loans.reads.verification import Arrival, BatchVerifier, Corruption, Entries, entries_of

MAX_PEERS = 1024
"""Workers that a rank stays connected to. A rank is not told of a departed worker that it does not read from: such a
worker is forgotten after reads from this many others."""
OnQuiet = Callable[[tuple[bytes, ...] | None, bool], None]
"""Callback on_quiet(fingerprints, peer_gone), called once, on any thread.

The fingerprints have one entry per block, or are None when not all blocks arrived."""
TransferRead = Read | Future[None]
"""A read by a transport or from a tier."""
ReadRun = Callable[[Sequence[int], Sequence[int]], Sequence[TransferRead]]
"""Callable read(block_ids, blocks) that starts the reads of remote `block_ids` into own `blocks`."""
Peers = list[tuple[BlockPart, Peer, "ReadProgress"]]
"""Ranks of another worker: the part of a block each holds, its peer, and the progress of reads from it."""


class RankRead(Protocol):
    """Handle of one block read on one rank."""

    def withdraw(self) -> list[int]:
        """Cancel what can be cancelled and return the blocks still being written.

        The read is over when `on_quiet` was called.
        """

    def stuck_s(self) -> float:
        """Return the seconds without progress at the origin; 0 when the read is quiet."""


class ReadProgress:
    """Progress of all reads from one origin.

    From any thread.

    A transport cannot tell a hanging read from a slow one, and reads queued behind a hanging one hang too. So the
    measure is the time since any of them ended.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_reading = 0
        self._moved_at = 0.0

    def follow(self, read: TransferRead) -> None:
        """Count one more queued or posted read."""
        with self._lock:
            if not self._num_reading:
                self._moved_at = self._clock()
            self._num_reading += 1
        read.add_done_callback(self._ended)

    def stuck_s(self) -> float:
        """Return the seconds since a read ended; 0 when none is in flight."""
        with self._lock:
            return self._clock() - self._moved_at if self._num_reading else 0.0

    def _ended(self, read: TransferRead) -> None:
        with self._lock:
            self._num_reading -= 1
            if not read.cancelled():
                self._moved_at = self._clock()


class BlockRead:
    """Several reads reported to the loop as one message, to wake it once.

    The bytes of each read are fingerprinted once they have arrived, unless the transport did that on the way;
    `borrower.py` compares. Reads end on any thread; the last one to be verified calls `on_quiet`, once.
    """

    def __init__(
        self, verify: Callable[[Arrival], None], on_quiet: OnQuiet, origins: Sequence[ReadProgress] = ()
    ) -> None:
        """Create the read.

        `verify` reports the fingerprints of an arrival, at once or later. `origins` are all sources read from.
        """
        self._verify = verify
        self._origins = origins
        self._on_quiet = on_quiet
        self._pieces: list[_Piece] = []
        self._lock = threading.Lock()
        self._num_reading = 0
        self._peer_gone = False
        self.withdrawn = False
        """Whether the blocks may be in use by others, as far as no read writes them."""

    def follow(self, pieces: Sequence[tuple[Sequence[int], Sequence[TransferRead]]]) -> None:
        """Follow runs of blocks and the reads that fill each.

        Called once.
        """
        self._pieces = [_Piece(blocks, list(reads), len(reads)) for blocks, reads in pieces]
        self._num_reading = len(self._pieces)
        for piece in self._pieces:
            for read in piece.reads:
                read.add_done_callback(functools.partial(self._quiet, piece))

    @property
    def is_quiet(self) -> bool:
        """Whether no read can write any more."""
        return self._num_reading == 0

    def stuck_s(self) -> float:
        return 0.0 if self.is_quiet else max((origin.stuck_s() for origin in self._origins), default=0.0)

    def withdraw(self) -> list[int]:
        self.withdrawn = True
        writing = list[int]()
        for piece in self._pieces:
            # cancel every read, even after one that cannot be cancelled
            cancelled = [read.cancel() or read.done() for read in piece.reads]
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
            piece.reads.clear()  # reads refer to this object through their callbacks: a reference cycle otherwise
        if piece.failed:
            self.over(piece, None)
        elif piece.found is not None:
            self.over(piece, entries_of(piece.found.reshape(len(piece.blocks), -1)))
        else:
            self._verify(_ArrivedPiece(self, piece))

    def over(self, piece: "_Piece", arrived: Entries | None) -> None:
        """Count a piece as over, with the fingerprints of its blocks or None."""
        piece.arrived = arrived
        with self._lock:
            self._num_reading -= 1
            if self._num_reading:
                return
        folds = list[bytes]()
        for each in self._pieces:
            if each.arrived is None:
                self._on_quiet(None, self._peer_gone)
                return
            folds += each.arrived
        self._on_quiet(tuple(folds), self._peer_gone)


class _Piece:
    """A run of blocks of a block read."""

    __slots__ = ("arrived", "blocks", "failed", "found", "num_reading", "reads")

    def __init__(self, blocks: Sequence[int], reads: list[TransferRead], num_reading: int) -> None:
        self.blocks, self.reads, self.num_reading = blocks, reads, num_reading
        self.failed = False
        self.found: Found = None
        """Fingerprints computed by the single read that brought the run, if any."""
        self.arrived: Entries | None = None


@dataclass(frozen=True, slots=True)
class _ArrivedPiece:
    """A piece that no read writes any more, as its verifier sees it."""

    read: BlockRead
    piece: _Piece

    @property
    def blocks(self) -> Sequence[int]:
        return self.piece.blocks

    @property
    def withdrawn(self) -> bool:
        return self.read.withdrawn

    def verified(self, entries: Entries | None) -> None:
        self.read.over(self.piece, entries)


class Rank(ABC):
    """One rank of this engine, as the borrower manager sees it.

    It reads its part of each block into its own pool.
    """

    @abstractmethod
    def start_read(
        self, endpoint: bytes, block_ids: Sequence[int], blocks: Sequence[int], flow: str, on_quiet: OnQuiet
    ) -> RankRead:
        """Start reading this rank's part of `block_ids` of the worker at `endpoint` into `blocks`.

        Never raises: a read that cannot start becomes quiet and failed. Reads of one `flow` take turns with those of
        others.
        """

    @abstractmethod
    def drop(self, endpoint: bytes) -> None:
        """Forget the departed worker at `endpoint`."""

    @abstractmethod
    def lanes_to(self, endpoint: bytes) -> Callable[[], tuple[str, ...]]:
        """Prepare reads from the worker at `endpoint`; return the function that tells the lanes these reads use.

        Raises TransferError where it is known now that the worker cannot be read.
        """


class RemoteRank(Rank):
    """A rank in another process."""

    endpoint: bytes
    """Endpoint of its part of the pool, for borrowers."""
    transport: str
    """Name of its transport."""

    @abstractmethod
    def start_copy(self, contents: Sequence[NDArray[np.uint8]], blocks: Sequence[int], on_quiet: OnQuiet) -> RankRead:
        """Start copying this rank's part of whole blocks, whose `contents` this process holds, into `blocks`.

        Never raises, like `start_read`.
        """

    @abstractmethod
    def corrupt(self, num_blocks: int) -> None:
        """Corrupt this rank's part of the next blocks that it reads, for a drill."""


class LocalRank(Rank):
    """The rank of this process."""

    def __init__(
        self,
        transport: Transport,
        part: BlockPart,
        fingerprints: Callable[[Sequence[int]], NDArray[np.uint64]],
        folding: Folding | None = None,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
    ) -> None:
        """Create the rank; its pool must be registered before the first read.

        `fingerprints` of blocks are [blocks, this rank's KV heads]; with `folding` the transport may compute them.
        `clock` returns seconds. `executor` replaces the thread that verifies blocks in a GPU's memory.
        """
        self._clock = clock
        self._transport = transport
        self._part = part
        self._fingerprints = fingerprints
        self._folding = folding
        self.batch_verifier = BatchVerifier(fingerprints, executor)
        self.peers: OrderedDict[bytes, Peers] = OrderedDict()
        """Peers by endpoint, most recently used last."""
        self.corruption: Corruption | None = None
        """Corruption of arriving blocks, during a drill."""

    def lanes_to(self, endpoint: bytes) -> Callable[[], tuple[str, ...]]:
        return functools.partial(lanes_of, self.connect(endpoint))

    def lanes_used(self, endpoint: bytes) -> tuple[str, ...]:
        """Return the lanes that reads from a connected worker have used.

        From any thread.
        """
        return lanes_of(self.peers.get(endpoint, []))

    def connect(self, endpoint: bytes) -> Peers:
        """Connect to the ranks of a worker that hold some of this rank's part.

        Raises TransferError.
        """
        if (known := self.peers.get(endpoint)) is not None:
            self.peers.move_to_end(endpoint)
            return known
        shares, of_stages = without_stages(endpoint)
        planes, num_blocks, ranks = without_planes(of_stages)
        if planes != self._part.planes:
            raise EndpointMismatch(f"the lender's blocks lie in {planes} planes, the borrower's in {self._part.planes}")
        try:
            self._transport.blocks_per_read(self._part.num_bytes)
        except ValueError as error:
            raise TransferError(str(error)) from error
        endpoints = split_endpoint(ranks)
        theirs = parts_of(self._part.block_bytes, len(endpoints), planes, num_blocks, shares, self._part.heads)
        peers = self.peers[endpoint] = [
            (part, self._transport.connect(own), ReadProgress(self._clock))
            for part, own in zip(theirs, endpoints, strict=True)
            if part_spans(self._part, part, [(0, 0)])
        ]
        while len(self.peers) > MAX_PEERS:
            self.drop(next(iter(self.peers)))
        return peers

    def start_read(
        self, endpoint: bytes, block_ids: Sequence[int], blocks: Sequence[int], flow: str, on_quiet: OnQuiet
    ) -> BlockRead:
        peers: Peers = []
        failure: TransferError | None = None
        try:
            peers = self.connect(endpoint)
        except TransferError as error:
            failure = error

        def read(block_ids: Sequence[int], blocks: Sequence[int]) -> Sequence[TransferRead]:
            return [failed_read(failure)] if failure else self._read(peers, block_ids, blocks, flow)

        run = self._transport.blocks_per_read(self._part.num_bytes, peers[0][1]) if len(peers) == 1 else None
        return self.follow(read, block_ids, blocks, on_quiet, [origin for _, _, origin in peers], run)

    def follow(
        self,
        read: ReadRun,
        block_ids: Sequence[int],
        blocks: Sequence[int],
        on_quiet: OnQuiet,
        origins: Sequence[ReadProgress],
        run_blocks: int | None = None,
    ) -> BlockRead:
        """Read `block_ids` into `blocks` by any kind of read, `run_blocks` at a time, each run verified on arrival.

        `read` registers its reads with `origins`.
        """
        block_read = BlockRead(self._verify, on_quiet, origins)
        step = run_blocks or self._blocks_per_read()
        runs = [slice(at, at + step) for at in range(0, len(blocks), step)]
        block_read.follow([(blocks[run], read(block_ids[run], blocks[run])) for run in runs])
        return block_read

    def drop(self, endpoint: bytes) -> None:
        for _, peer, _ in self.peers.pop(endpoint, []):
            self._transport.drop(peer)

    def _read(self, peers: Peers, block_ids: Sequence[int], blocks: Sequence[int], flow: str) -> list[Read]:
        reads: list[Read] = []
        # with several peers or planes a read brings only pieces of blocks
        folding = self._folding if len(peers) == self._part.planes == 1 and not self._is_corrupting else None
        pairs = list(zip(blocks, block_ids, strict=True))
        if self._transport.on_gpu:
            pairs.sort()  # allocators hand blocks out in falling order, too; rising neighbours become one span
        for theirs, peer, progress in peers:
            spans = part_spans(self._part, theirs, pairs)
            try:
                read = self._transport.read(peer, spans, flow, folding)
                progress.follow(read)
                reads.append(read)
            except ValueError:  # the lender announced a block outside its pool
                reads.append(failed_read(TransferError("announced blocks lie outside the lender's pool")))
        return reads

    def _blocks_per_read(self) -> int:
        try:
            return self._transport.blocks_per_read(self._part.num_bytes)
        except ValueError:  # larger than any read of a peer, which `connect` refuses; tiers copy a block at a time
            return 1

    def _verify(self, arrival: Arrival) -> None:
        """Verify blocks that arrived: in main memory now, while they are in this core's cache."""
        if self.corruption is not None:
            self.corruption.strike(arrival.blocks)
        if self._transport.on_gpu:
            self.batch_verifier.add(arrival)
        else:
            arrival.verified(entries_of(self._fingerprints(arrival.blocks)))

    @property
    def _is_corrupting(self) -> bool:
        """Whether arriving blocks will be changed, so that what a transport found of them on the way would be wrong."""
        return self.corruption is not None and self.corruption.active


def lanes_of(peers: Peers) -> tuple[str, ...]:
    """Return the lanes used by reads from these peers, departed ones included; empty before the first read."""
    return tuple(dict.fromkeys(lane for _, peer, _ in peers for lane in peer.lanes))


def failed_read(error: TransferError) -> Read:
    """Return a read that has already failed with `error`."""
    future = Read()
    future.set_exception(error)
    return future
