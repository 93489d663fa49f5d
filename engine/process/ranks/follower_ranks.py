"""Follower ranks of a torch engine as rank 0 sees them: processes of their own that compute steps on its command."""

import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Sequence as Seq
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.config import WorkerConfig
from engine.process.ranks.ranks import PartLink, Ranks, shut_down
from engine.process.spec import EngineSpec, RankSpec
from engine.tensor_parallel.runner import FollowingRank
from engine.tensor_parallel.shared_memory import SharedMemory

END_S = 3.0
"""Seconds for a follower that was told to end."""


class Follower(PartLink, FollowingRank):
    """One follower.

    `begin_step` and `end_step` belong to the compute thread, all else to the main thread.
    """

    def __init__(self, spec: RankSpec, memory: SharedMemory, on_lost: Callable[[], None]) -> None:
        self._process, reads, self._steps = _start_process(memory.descriptor)
        reads.send(spec)
        super().__init__(spec.rank, reads, memory, on_lost)

    def close(self) -> None:
        """End the process; by force if it does not end."""
        super().close()
        shut_down(self._steps)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

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


class FollowerRanks(Ranks):
    """All followers of an engine, whose process is rank 0."""

    def __init__(self, spec: EngineSpec, wake: Callable[[], None]) -> None:
        """Start the processes, before this one lowers its priority, which they would inherit.

        `wake` is called, on any thread, when a follower is lost.
        """
        super().__init__()
        self.meeting = Path(tempfile.mkdtemp(prefix="tandem-ranks-")) / "meeting"
        self.followers = [
            Follower(RankSpec(spec, rank, self.meeting), self.memory, wake)
            for rank in range(1, spec.config.tensor_parallel)
        ]

    @property
    def links(self) -> Seq[Follower]:
        return self.followers

    @property
    def num_links(self) -> int:
        return len(self.followers)

    def own_share(self, config: WorkerConfig) -> WorkerConfig:
        return config.of_rank(0)

    def met(self) -> None:
        """Remove the meeting file once the ranks have found each other."""
        shutil.rmtree(self.meeting.parent, ignore_errors=True)

    def close(self) -> None:
        self.met()
        for follower in self.followers:
            follower.close()


def _start_process(memory: int) -> tuple["subprocess.Popen[bytes]", Connection, Connection]:
    """Start a follower; return it and this end of its two sockets, for reads and for steps.

    `memory` is the descriptor of the shared memory.
    """
    pairs = [socket.socketpair() for _ in range(2)]
    theirs = [*(other.fileno() for _, other in pairs), memory]
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.launch", "engine.process.ranks.follower_process", *map(str, theirs)],
        pass_fds=theirs,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    for _, other in pairs:
        other.close()
    reads, steps = (Connection(own.detach()) for own, _ in pairs)
    return process, reads, steps
