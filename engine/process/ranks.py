"""Follower ranks of an engine as rank 0 sees them: starts their processes, commands them, and notices when one is gone.

Rank 0 then ends too, since the rest of the engine could compute nothing.
"""

import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineStartError, RankLost
from engine.kv.rows import Place
from engine.lending.block_reads import OnQuiet, RemoteRank
from engine.process.spec import EngineSpec, RankSpec
from engine.tensor_parallel.messages import (
    Answer,
    BlocksRead,
    Copy,
    CopyBlocks,
    Drop,
    FromFollower,
    Gather,
    Heartbeat,
    Joined,
    NotJoined,
    OpenDisk,
    ReadBlocks,
    ToFollower,
    Withdraw,
)
from engine.tensor_parallel.runner import FollowingRank
from engine.tensor_parallel.shared_memory import SharedMemory, SharedPlace
from kvtransfer.errors import TransportUnavailable

log = logging.getLogger(__name__)

ANSWER_S = 20.0
"""Seconds without an answer of its main thread after which a follower counts as gone, whatever its process does."""
SILENT_S = 1.0
"""Seconds without a heartbeat after which a follower counts as hanging; the engine then sends no load reports."""
JOIN_POLL_S = 0.02
END_S = 3.0
"""Seconds for a follower that was told to end."""


class Follower(RemoteRank, FollowingRank):
    """One follower.

    `begin_step` and `end_step` belong to the compute thread, all else to the main thread.
    """

    def __init__(self, spec: RankSpec, memory: SharedMemory, on_lost: Callable[[], None]) -> None:
        self.rank = spec.rank
        self.lost: RankLost | None = None
        self._memory = memory
        self._on_lost = on_lost
        self._joined: Future[bytes] = Future()
        self._answers: SimpleQueue[Answer | None] = SimpleQueue()
        self._quiet: dict[int, OnQuiet] = {}
        """Completion callbacks, by number of the block read."""
        self._num_block_reads = 0
        self._stuck_s: dict[int, float] = {}
        """Seconds without progress, by number of the block read, as last reported."""
        self._last_message_at = time.monotonic()
        self._process, self._reads, self._steps = _start_process(memory.descriptor)
        self._reads.send(spec)
        threading.Thread(target=self._listen, name=f"rank-{self.rank}", daemon=True).start()

    @property
    def is_silent(self) -> bool:
        """Whether it has joined and its heartbeat is missing."""
        return time.monotonic() - self._last_message_at >= SILENT_S

    def stuck_s(self, number: int) -> float:
        """Return the seconds without progress of a block read."""
        return self._stuck_s.get(number, 0.0)

    def wait_joined(self) -> bool:
        """Return whether its shard is loaded.

        Raises its failure: EngineStartError or RankLost.
        """
        if not self._joined.done():
            return False
        self.endpoint = self._joined.result()
        return True

    def close(self) -> None:
        """End the process; by force if it does not end."""
        for end in (self._reads, self._steps):  # closing alone would not end a read of another thread
            with suppress(OSError), socket.socket(fileno=os.dup(end.fileno())) as whole:
                whole.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # ------------------------------------------------------------------ steps

    def begin_step(self, step: bytes) -> None:
        try:
            self._steps.send_bytes(step)
        except OSError as error:
            raise self._is_lost(str(error)) from None

    def end_step(self) -> NDArray[np.uint64]:
        try:
            fingerprints: NDArray[np.uint64] = pickle.loads(self._steps.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._is_lost(str(error) or "it ended in a step") from None
        return fingerprints

    def copy_block(self, source: int, target: int) -> None:
        self._ask(Copy(source, target))

    # ------------------------------------------------------------------ whole blocks

    def begin_gather(self, blocks: Seq[int], rows: NDArray[np.uint8]) -> None:
        self._tell(Gather(tuple(blocks), self._memory.offset_of(rows)))

    def end_gather(self) -> None:
        self._answer()

    def open_disk(self, path: Path) -> None:
        """Let the follower read the disk tier's file."""
        self._tell(OpenDisk(path))

    def start_copy(self, places: Seq[Place], blocks: Seq[int], on_quiet: OnQuiet) -> "_RemoteRead":
        number = self._new_read(on_quiet)
        self._tell(CopyBlocks(number, tuple(self._shared(place) for place in places), tuple(blocks)))
        return _RemoteRead(self, number)

    def _shared(self, place: Place) -> SharedPlace:
        return SharedPlace(place, True) if isinstance(place, int) else SharedPlace(self._memory.offset_of(place), False)

    # ------------------------------------------------------------------ reads

    def start_read(
        self, endpoint: bytes, block_ids: Seq[int], blocks: Seq[int], flow: str, on_quiet: OnQuiet
    ) -> "_RemoteRead":
        number = self._new_read(on_quiet)
        self._tell(ReadBlocks(number, endpoint, tuple(block_ids), tuple(blocks), flow))
        return _RemoteRead(self, number)

    def _new_read(self, on_quiet: OnQuiet) -> int:
        self._num_block_reads += 1
        self._quiet[self._num_block_reads] = on_quiet
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
            self._reads.send(message)
        except OSError as error:
            self._is_lost(str(error))  # the loop checks for it

    def _ask(self, message: ToFollower) -> Answer:
        self._tell(message)
        return self._answer()

    def _answer(self) -> Answer:
        try:
            answer = None if self.lost is not None else self._answers.get(timeout=ANSWER_S)
        except Empty:
            raise self._is_lost(f"no answer for {ANSWER_S:.0f} s") from None
        if answer is None:
            raise self._is_lost("its process ended")
        return answer

    # ------------------------------------------------------------------ what it says, on a thread of its own

    def _listen(self) -> None:
        try:
            while True:
                self._hear(self._reads.recv())
        except (EOFError, OSError):
            lost = self._is_lost("its process ended")
        self._answers.put(None)
        if not self._joined.done():
            self._joined.set_exception(lost)

    def _hear(self, message: FromFollower) -> None:
        self._last_message_at = time.monotonic()
        match message:
            case Heartbeat(stuck_s):
                self._stuck_s = stuck_s
            case Joined(endpoint):
                self._joined.set_result(endpoint)
            case NotJoined(field, reason):
                self._joined.set_exception(EngineStartError(field, reason))
            case BlocksRead(number, fingerprints, peer_gone):
                self._quiet.pop(number)(fingerprints, peer_gone)
            case Answer():
                self._answers.put(message)

    def _is_lost(self, how: str) -> RankLost:
        if self.lost is None:
            self.lost = RankLost(self.rank, how)
            self._on_lost()
        return self.lost


@dataclass(frozen=True, slots=True)
class _RemoteRead:
    """Handle of a block read on another rank."""

    follower: Follower
    number: int

    def withdraw(self) -> list[int]:
        return self.follower.withdraw(self.number)

    def stuck_s(self) -> float:
        return self.follower.stuck_s(self.number)


class Ranks:
    """All followers of an engine."""

    def __init__(self, spec: EngineSpec, wake: Callable[[], None]) -> None:
        """Start the processes.

        `wake` is called, on any thread, when a follower is lost.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-ranks-"))
        self.meeting = self._folder / self._folder.name  # vLLM names shared memory after the file's name
        self.memory = SharedMemory()
        """Memory that all ranks map."""
        self.followers = [
            Follower(RankSpec(spec, rank, self.meeting), self.memory, wake)
            for rank in range(1, spec.config.tensor_parallel)
        ]

    def check(self) -> None:
        """Check that no follower is lost.

        Raises RankLost.
        """
        for follower in self.followers:
            if follower.lost is not None:
                raise follower.lost

    @property
    def silent(self) -> bool:
        """Whether a follower's heartbeat is missing, so the engine must not report load."""
        return any(follower.is_silent for follower in self.followers)

    def all_joined(self) -> bool:
        """Return whether all followers have joined.

        Raises EngineStartError or RankLost.
        """
        joined = [follower.wait_joined() for follower in self.followers]  # each of them, since any may have failed
        return all(joined)

    def wait_for(self, made: "Future[Any]") -> None:
        """Wait until all followers have joined and `made`, of rank 0, is done; less long if it failed.

        Raises EngineStartError or RankLost of a follower.
        """
        while not (self.all_joined() and made.done()):
            if made.done() and made.exception() is not None:
                return
            time.sleep(JOIN_POLL_S)

    def met(self) -> None:
        """Remove the meeting file once the ranks have found each other."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        self.met()
        for follower in self.followers:
            follower.close()


def start_failure(error: TransportUnavailable | RankLost) -> str:
    """Return the message of a start that failed for want of a transport or a rank."""
    field = "tensor_parallel" if isinstance(error, RankLost) else "transport"
    return f"{field}: {error}"


def serve(loop: Callable[[], None], ranks: Ranks | None) -> None:
    """Run an engine's loop until its front is gone; end the process if another rank is lost."""
    try:
        loop()
    except (EOFError, ConnectionError):
        pass  # the front is gone, by its own end or by ours: no process is left to serve
    except Exception as error:
        if ranks is None:
            raise
        log.error("the engine cannot go on: %s", error)  # the lost rank, or the sum that failed without it
        os._exit(1)  # the compute thread may wait in such a sum for ever; the other ranks die with this one


def leave(ranks: Ranks | None) -> None:
    """End the process if it has other ranks: its compute thread may be waiting for them for ever."""
    if ranks is not None:
        ranks.close()
        os._exit(0)


def _start_process(memory: int) -> tuple["subprocess.Popen[bytes]", Connection, Connection]:
    """Start a follower; return it and this end of its two sockets, for reads and for steps.

    `memory` is the descriptor of the shared memory.
    """
    pairs = [socket.socketpair() for _ in range(2)]
    theirs = [*(other.fileno() for _, other in pairs), memory]
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.launch", "engine.process.follower_process", *map(str, theirs)],
        pass_fds=theirs,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    for _, other in pairs:
        other.close()
    reads, steps = (Connection(own.detach()) for own, _ in pairs)
    return process, reads, steps
