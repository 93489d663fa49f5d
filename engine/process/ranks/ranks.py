"""Ranks of an engine in other processes, as the engine process sees them: it commands them and notices a lost one.

The engine process then ends too, since the rest of the engine could compute nothing.
"""

import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from engine.block_parts.messages import (
    BlocksRead,
    CopyBlocks,
    Corrupt,
    Drop,
    Fingerprint,
    Fingerprinted,
    FingerprintingRank,
    FromFollower,
    Gather,
    Heartbeat,
    Joined,
    NotJoined,
    RankReply,
    ReadBlocks,
    ToFollower,
    Withdraw,
)
from engine.block_parts.part_service import SharedMemory
from engine.config import WorkerConfig
from engine.errors import EngineStartError, RankLost
from kvtransfer.errors import TransportUnavailable
from kvtransfer.ranks import BlockPart
from loans.reads.block_reads import MAX_PEERS, OnQuiet, RemoteRank

log = logging.getLogger(__name__)

ANSWER_S = 20.0
"""Seconds without an answer after which a rank counts as gone, whatever its process does."""
SILENT_S = 1.0
"""Seconds without a heartbeat after which a rank counts as hanging; the engine then sends no load reports."""
JOIN_POLL_S = 0.02


class PartLink(RemoteRank, FingerprintingRank):
    """One rank in another process, which holds a part of every block.

    Its methods belong to the main thread, except those of fingerprints.
    """

    def __init__(self, rank: int, link: Connection, memory: SharedMemory, on_lost: Callable[[], None]) -> None:
        """Create it for a connection whose other end serves the rank's part, and maps `memory`.

        `on_lost` is called, on any thread, when the rank is lost.
        """
        self.rank = rank
        self.lost: RankLost | None = None
        self._memory = memory
        self._on_lost = on_lost
        self.joined: Future[Joined] = Future()
        """The rank's answer once its pool is registered, or why it could not start."""
        self._answers: SimpleQueue[RankReply | None] = SimpleQueue()
        self._quiet: dict[int, tuple[OnQuiet, bytes]] = {}
        """Completion callback and endpoint, by number of the block read."""
        self._num_block_reads = 0
        self._stuck_s: dict[int, float] = {}
        """Seconds without progress, by number of the block read, as last reported."""
        self._lanes: dict[bytes, tuple[str, ...]] = {}
        """Lanes of reads by endpoint, as last reported."""
        self._hashing: dict[int, Future[NDArray[np.uint64]]] = {}
        self._num_hashed = 0
        self._hashing_lock = threading.Lock()
        self._last_message_at = time.monotonic()
        self._link = link
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, name=f"rank-{self.rank}", daemon=True).start()

    @property
    def is_silent(self) -> bool:
        """Whether its heartbeat is missing."""
        return self.silent_s >= SILENT_S

    @property
    def silent_s(self) -> float:
        """Seconds since its last message."""
        return time.monotonic() - self._last_message_at

    def stuck_s(self, number: int) -> float:
        """Return the seconds without progress of a block read."""
        return self._stuck_s.get(number, 0.0)

    def wait_joined(self) -> bool:
        """Return whether its model is loaded.

        Raises its failure: EngineStartError or RankLost.
        """
        if not self.joined.done():
            return False
        joined = self.joined.result()
        self.endpoint, self.transport = joined.endpoint, joined.transport
        return True

    def send_order(self, order: object) -> None:
        """Send a rank the first message of the connection, where it waits for one."""
        with self._sending:
            self._link.send(order)

    def close(self) -> None:
        """End the connection, which ends the rank's process."""
        shut_down(self._link)

    def corrupt(self, num_blocks: int) -> None:
        self._tell(Corrupt(num_blocks))

    # ------------------------------------------------------------------ whole blocks

    def begin_gather(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        self._tell(Gather(tuple(blocks), self._memory.offset_of(rows)))

    def end_gather(self) -> None:
        self._answer()

    def start_copy(
        self, contents: Sequence[NDArray[np.uint8]], blocks: Sequence[int], on_quiet: OnQuiet
    ) -> "_RemoteRead":
        number = self._new_read(on_quiet, b"")
        self._tell(CopyBlocks(number, tuple(self._source(content) for content in contents), tuple(blocks)))
        return _RemoteRead(self, number)

    def _source(self, content: NDArray[np.uint8]) -> int | bytes:
        return self._memory.offset_of(content)

    # ------------------------------------------------------------------ fingerprints

    def begin_fingerprints(self, blocks: Sequence[int]) -> "Future[NDArray[np.uint64]]":
        future: Future[NDArray[np.uint64]] = Future()
        with self._hashing_lock:
            self._num_hashed += 1
            number = self._num_hashed
            self._hashing[number] = future
        self._tell(Fingerprint(number, tuple(blocks)))
        if self.lost is not None:
            self._fail_fingerprints(self.lost)  # `_listen` may have ended before this one was recorded
        return future

    def end_fingerprints(self, begun: "Future[NDArray[np.uint64]]") -> NDArray[np.uint64]:
        try:
            return begun.result(ANSWER_S)
        except TimeoutError:
            raise self._is_lost(f"no fingerprints for {ANSWER_S:.0f} s") from None

    def _fail_fingerprints(self, lost: RankLost) -> None:
        with self._hashing_lock:
            hashing, self._hashing = self._hashing, {}
        for future in hashing.values():
            future.set_exception(lost)

    # ------------------------------------------------------------------ reads

    def lanes_to(self, endpoint: bytes) -> Callable[[], tuple[str, ...]]:
        return lambda: self._lanes.get(endpoint, ())

    def start_read(
        self, endpoint: bytes, block_ids: Sequence[int], blocks: Sequence[int], flow: str, on_quiet: OnQuiet
    ) -> "_RemoteRead":
        number = self._new_read(on_quiet, endpoint)
        self._tell(ReadBlocks(number, endpoint, tuple(block_ids), tuple(blocks), flow))
        return _RemoteRead(self, number)

    def _new_read(self, on_quiet: OnQuiet, endpoint: bytes) -> int:
        self._num_block_reads += 1
        self._quiet[self._num_block_reads] = on_quiet, endpoint
        return self._num_block_reads

    def drop(self, endpoint: bytes) -> None:
        self._tell(Drop(endpoint))

    def withdraw(self, number: int) -> list[int]:
        """Withdraw a block read; return the blocks that it is still writing.

        Raises RankLost.
        """
        return list(self._ask(Withdraw(number)).blocks)

    def _tell(self, message: ToFollower) -> None:
        try:
            with self._sending:
                self._link.send(message)
        except OSError as error:
            self._is_lost(str(error))  # the loop checks for it

    def _ask(self, message: ToFollower) -> RankReply:
        self._tell(message)
        return self._answer()

    def _answer(self) -> RankReply:
        try:
            answer = None if self.lost is not None else self._answers.get(timeout=ANSWER_S)
        except Empty:
            raise self._is_lost(f"no answer for {ANSWER_S:.0f} s") from None
        if answer is None:
            raise self._is_lost("its process ended")
        return answer

    # ------------------------------------------------------------------ what it reports, on a thread of its own

    def _listen(self) -> None:
        try:
            while True:
                self._hear(self._link.recv())
        except (EOFError, OSError):
            lost = self._is_lost("its process ended")
        self._answers.put(None)
        self._fail_fingerprints(lost)
        if not self.joined.done():
            self.joined.set_exception(lost)

    def _hear(self, message: FromFollower) -> None:
        self._last_message_at = time.monotonic()
        match message:
            case Heartbeat(stuck_s):
                self._stuck_s = stuck_s
            case Joined():
                self.joined.set_result(message)
            case NotJoined(field, reason):
                if not self.joined.done():
                    self.joined.set_exception(EngineStartError(field, reason))
            case BlocksRead(number, fingerprints, peer_gone, lanes):
                on_quiet, endpoint = self._quiet.pop(number)
                if lanes:
                    self._lanes.pop(endpoint, None)
                    self._lanes[endpoint] = lanes
                    if len(self._lanes) > MAX_PEERS:
                        del self._lanes[next(iter(self._lanes))]
                on_quiet(fingerprints, peer_gone)
            case Fingerprinted(number, computed):
                with self._hashing_lock:
                    future = self._hashing.pop(number)
                future.set_result(computed)
            case RankReply():
                self._answers.put(message)

    def _is_lost(self, how: str) -> RankLost:
        if self.lost is None:
            self.lost = RankLost(self.rank, how)
            self._on_lost()
        return self.lost


class DistantLink(PartLink):
    """A rank on another node, which maps no memory of this one: bytes of its part go over the connection."""

    def begin_gather(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        self._rows = rows
        self._tell(Gather(tuple(blocks), None))

    def end_gather(self) -> None:
        for row, content in zip(self._rows, self._answer().contents, strict=True):
            self._part.put(np.frombuffer(content, np.uint8), row)

    def _source(self, content: NDArray[np.uint8]) -> int | bytes:
        return self._part.of(content).tobytes()

    @property
    def _part(self) -> BlockPart:
        part = self.joined.result().part
        assert part is not None
        return part


@dataclass(frozen=True, slots=True)
class _RemoteRead:
    """Handle of a block read on another rank."""

    link: PartLink
    number: int

    def withdraw(self) -> list[int]:
        return self.link.withdraw(self.number)

    def stuck_s(self) -> float:
        return self.link.stuck_s(self.number)


class Ranks(ABC):
    """All ranks of an engine that are in other processes."""

    def __init__(self) -> None:
        self.memory = SharedMemory()
        """Memory that all ranks map."""

    @property
    @abstractmethod
    def links(self) -> Sequence[PartLink]:
        """The ranks, in order; those that have connected so far."""

    @property
    @abstractmethod
    def num_links(self) -> int:
        """Number of ranks that must join."""

    @abstractmethod
    def own_share(self, config: WorkerConfig) -> WorkerConfig:
        """Return the settings with the engine process's own share of the worker's resources."""

    @abstractmethod
    def close(self) -> None:
        """End the ranks' processes."""

    def check(self) -> None:
        """Check that no rank is lost.

        Raises RankLost.
        """
        for link in self.links:
            if link.lost is not None:
                raise link.lost

    @property
    def silent(self) -> bool:
        """Whether a rank's heartbeat is missing, so the engine must not report load."""
        return any(link.is_silent for link in self.links)

    def all_joined(self) -> bool:
        """Return whether all ranks have joined.

        Raises EngineStartError or RankLost.
        """
        joined = [link.wait_joined() for link in self.links]  # each of them, since any may have failed
        return len(joined) == self.num_links and all(joined)

    def wait_for(self) -> None:
        """Wait until all ranks have joined.

        Raises EngineStartError or RankLost of a rank.
        """
        while not self.all_joined():
            time.sleep(JOIN_POLL_S)


def shut_down(link: Connection) -> None:
    """End a connection in both directions; closing alone would not end a read of another thread."""
    with suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as whole:
        whole.shutdown(socket.SHUT_RDWR)


def start_failure(error: TransportUnavailable | RankLost) -> str:
    """Return the message of a start that failed for want of a transport or a rank."""
    field = "tensor_parallel" if isinstance(error, RankLost) else "transport"
    return f"{field}: {error}"


def serve(loop: Callable[[], None], has_others: bool) -> None:
    """Run an engine's loop until its front is gone; end the process if another rank is lost, where it has others."""
    try:
        loop()
    except (EOFError, ConnectionError):
        pass  # the front is gone, by its own end or by ours: no process is left to serve
    except Exception as error:
        if not has_others:
            raise
        log.error("the engine cannot go on: %s", error)  # the lost rank, or the sum that failed without it
        os._exit(1)  # the compute thread may wait in such a sum for ever; the other ranks die with this one


def leave(ranks: Ranks | None) -> None:
    """End the process if it has other ranks: its compute thread may be waiting for them for ever."""
    if ranks is not None:
        ranks.close()
        os._exit(0)
