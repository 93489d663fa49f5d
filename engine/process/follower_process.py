"""A follower rank: `python -m cluster.launch engine.process.follower_process READS_FD STEPS_FD MEMORY_FD`.

Two threads, as in rank 0. The main thread performs reads into this rank's part of the pool; the other loads this rank's
shard of the model and computes the steps. The process ends with rank 0: by the closed sockets, or at once by the
kernel, whatever it waits for.
"""

import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.garbage_collection import spare_the_started
from cluster.logs import set_up
from engine.errors import EngineStartError
from engine.lending.block_reads import BlockRead, LocalRank, OnQuiet
from engine.process.runners import open_torch_runner
from engine.process.spec import RankSpec
from engine.process.start_up import become_child, own_transport, prepare
from engine.process.vllm_start import prepare_vllm, start_vllm
from engine.tensor_parallel.messages import (
    HEARTBEAT_S,
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
    Withdraw,
)
from engine.tensor_parallel.part_copies import PartCopies
from engine.tensor_parallel.shared_memory import MappedMemory
from engine.tensor_parallel.steps import StepReader, filled_blocks
from kvtransfer.errors import TransportUnavailable
from kvtransfer.fingerprint import Folding
from kvtransfer.ranks import BlockPart
from kvtransfer.transport import AnyPool

log = logging.getLogger(__name__)


class _Rank0:
    """Rank 0's main thread as this rank sees it.

    Any thread may send.
    """

    def __init__(self, reads: Connection) -> None:
        self._reads = reads
        self._lock = threading.Lock()

    def send(self, message: FromFollower) -> None:
        try:
            with self._lock:
                self._reads.send(message)
        except OSError:
            os._exit(0)  # rank 0 is gone


class FollowerRunner(Protocol):
    """Runner of this rank's shard of the model."""

    pool: AnyPool
    part: BlockPart
    """Part of each block that `pool` holds."""
    folding: Folding | None

    def follow(self, step: bytes) -> NDArray[np.uint64]:
        """Compute rank 0's step; return this rank's fingerprints of the blocks that it filled, [blocks, KV heads]."""

    def fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """Return fingerprints of this rank's part of blocks, [blocks, its KV heads].

        From any thread.
        """

    def copy_block(self, source: int, target: int) -> None:
        """Make block `target` equal to `source`."""

    def read_blocks(self, blocks: Sequence[int]) -> Iterable[NDArray[np.uint8]]:
        """Return this rank's part of blocks that no step writes.

        From any thread.
        """

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        """Set this rank's part of a block; it is visible on return. From any thread."""


class _TorchFollower:
    def __init__(self, spec: RankSpec) -> None:
        self._runner = open_torch_runner(spec.config, spec.engine.role, rank=spec)
        self._reader = StepReader()
        self.pool = self._runner.pool
        self.part = BlockPart(self._runner.layout.block_bytes, spec.rank, spec.ranks)
        self.folding = self._runner.folding
        self.fingerprints = self._runner.fingerprints
        self.copy_block = self._runner.copy_block
        self.read_blocks = self._runner.read_blocks
        self.write_block = self._runner.write_block

    def follow(self, step: bytes) -> NDArray[np.uint64]:
        batch = self._reader.batch(pickle.loads(step))
        self._runner.follow(batch)
        return self.fingerprints(filled_blocks(batch, self._runner.layout.block_tokens))


def _open_runner(spec: RankSpec) -> FollowerRunner:
    """Load this rank's shard, on the thread that computes.

    Raises EngineStartError.
    """
    if spec.config.engine != "vllm":
        return _TorchFollower(spec)
    started = start_vllm(spec.config, spec.engine.role, spec)
    from engine.backends.vllm.batch_runner import VllmFollower

    return VllmFollower(started.engine.model_executor, started.memory)


class _Stepper:
    """Thread that loads the model and computes."""

    def __init__(self, spec: RankSpec, steps: Connection) -> None:
        self._spec = spec
        self._steps = steps
        self._made: Future[FollowerRunner] = Future()
        threading.Thread(target=self._run, name="rank-compute", daemon=True).start()

    def runner(self) -> FollowerRunner:
        """Wait until the model is loaded; return the runner. Raises EngineStartError."""
        return self._made.result()

    def _run(self) -> None:
        try:
            runner = _open_runner(self._spec)
        except BaseException as error:
            self._made.set_exception(error)
            return
        self._made.set_result(runner)
        try:
            while True:
                filled = runner.follow(self._steps.recv_bytes())
                self._steps.send_bytes(pickle.dumps(filled, pickle.HIGHEST_PROTOCOL))
        except (EOFError, OSError):
            os._exit(0)  # rank 0 is gone; the main thread may be within a call that never ends
        except BaseException:
            log.exception("rank %d cannot go on", self._spec.rank)
            os._exit(1)


def main() -> None:
    """Follow rank 0, at the other ends of the sockets whose descriptors are the arguments, with its memory's."""
    become_child()
    reads, steps = (Connection(int(descriptor)) for descriptor in sys.argv[1:3])
    memory = MappedMemory(int(sys.argv[3]))
    spec: RankSpec = reads.recv()
    rank0 = _Rank0(reads)
    set_up(spec.engine.role, f"{spec.engine.worker_id}/rank {spec.rank}", spec.config)
    try:
        prepare(spec.config)
        if spec.config.engine == "vllm":
            prepare_vllm(spec.config)
        transport = own_transport(spec.config, spec.agent_name)
        runner = _Stepper(spec, steps).runner()
        endpoint = transport.register(runner.pool)
    except (EngineStartError, TransportUnavailable) as error:
        field, reason = (error.field, error.reason) if isinstance(error, EngineStartError) else ("transport", error)
        rank0.send(NotJoined(field, str(reason)))
        os._exit(1)  # other threads may wait for ranks that never come
    rank = LocalRank(transport, runner.part, runner.fingerprints, runner.folding)
    copies = PartCopies(runner.part, runner, memory, rank)
    rank0.send(Joined(endpoint))
    spare_the_started()
    try:
        _serve(reads, rank0.send, rank, copies, runner.copy_block)
    except (EOFError, OSError):
        os._exit(0)  # readers of the pool see a process that ended, as with rank 0
    except BaseException:
        log.exception("rank %d cannot go on", spec.rank)
        os._exit(1)  # an ordinary end would wait for threads that copy, of which one may hang


def _serve(
    reads: Connection,
    say: Callable[[FromFollower], None],
    rank: LocalRank,
    copies: PartCopies,
    copy: Callable[[int, int], None],
) -> None:
    block_reads: dict[int, BlockRead] = {}

    def begin(number: int, start: Callable[[OnQuiet], BlockRead]) -> None:
        block_read = block_reads[number] = start(partial(quiet, number))
        if block_read.is_quiet:  # it may have been quiet before it was recorded
            block_reads.pop(number, None)

    def quiet(number: int, fingerprints: tuple[bytes, ...] | None, peer_gone: bool) -> None:
        block_reads.pop(number, None)
        say(BlocksRead(number, fingerprints, peer_gone))

    heartbeat_at = time.monotonic()
    while True:
        if (now := time.monotonic()) >= heartbeat_at:
            stuck_s = {number: block_read.stuck_s() for number, block_read in list(block_reads.items())}
            say(Heartbeat({number: seconds for number, seconds in stuck_s.items() if seconds >= HEARTBEAT_S}))
            heartbeat_at = now + HEARTBEAT_S
        if not reads.poll(heartbeat_at - now):
            continue
        match reads.recv():
            case ReadBlocks(number, endpoint, block_ids, blocks, flow):
                begin(number, partial(rank.start_read, endpoint, block_ids, blocks, flow))
            case CopyBlocks(number, places, blocks):
                begin(number, partial(copies.start, places, blocks))
            case Gather(blocks, offset):
                copies.gather(blocks, offset)
                say(Answer())
            case OpenDisk(path):
                copies.open_disk(path)
            case Withdraw(number):
                pending_read = block_reads.get(number)
                say(Answer(tuple(pending_read.withdraw()) if pending_read is not None else ()))
            case Copy(source, target):
                copy(source, target)
                say(Answer())
            case Drop(endpoint):
                rank.drop(endpoint)
