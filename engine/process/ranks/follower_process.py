"""A torch follower: `python -m cluster.launch engine.process.ranks.follower_process READS_FD STEPS_FD MEMORY_FD`.

Two threads, as in rank 0. The main thread performs reads into this rank's part of the pool; the other loads this rank's
shard of the model and computes the steps. The process ends with rank 0: by the closed sockets, or at once by the
kernel, whatever it waits for.
"""

import logging
import os
import pickle
import sys
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from cluster.logs import set_up
from cluster.process.garbage_collection import spare_the_started
from engine.engine_kind import runner_kind_of
from engine.errors import EngineStartError
from engine.lending.reads.block_reads import LocalRank
from engine.process.spec import RankSpec
from engine.process.start_up import become_child, own_transport, prepare
from engine.tensor_parallel.messages import Joined, NotJoined
from engine.tensor_parallel.part_copies import PartCopies
from engine.tensor_parallel.part_service import EngineLink, serve_part
from engine.tensor_parallel.shared_memory import MappedMemory
from engine.tensor_parallel.steps import StepReader, filled_blocks
from kvtransfer.errors import TransportUnavailable
from kvtransfer.ranks import BlockPart

log = logging.getLogger(__name__)


class _Runner:
    """Runner of this rank's shard of the model."""

    def __init__(self, spec: RankSpec) -> None:
        self._runner = runner_kind_of(spec.config.engine).open_runner(spec.config, spec.engine.role, spec.info)
        self._reader = StepReader()
        self.pool = self._runner.pool
        self.part = BlockPart(self._runner.layout.block_bytes, spec.rank, spec.ranks)
        self.folding = self._runner.folding
        self.fingerprints = self._runner.fingerprints
        self.copy_block = self._runner.copy_block
        self.read_blocks = self._runner.read_blocks
        self.write_block = self._runner.write_block

    def follow(self, step: bytes) -> NDArray[np.uint64]:
        """Compute rank 0's step; return fingerprints of this rank's part of the blocks that it filled."""
        batch = self._reader.batch(pickle.loads(step))
        self._runner.follow(batch)
        return self.fingerprints(filled_blocks(batch, self._runner.layout.block_tokens))


class _Stepper:
    """Thread that loads the model and computes."""

    def __init__(self, spec: RankSpec, steps: Connection) -> None:
        self._spec = spec
        self._steps = steps
        self._made: Future[_Runner] = Future()
        threading.Thread(target=self._run, name="rank-compute", daemon=True).start()

    def runner(self) -> _Runner:
        """Wait until the model is loaded; return the runner. Raises EngineStartError."""
        return self._made.result()

    def _run(self) -> None:
        try:
            runner = _Runner(self._spec)
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
    rank0 = EngineLink(reads)
    set_up(spec.engine.role, f"{spec.engine.worker_id}/rank {spec.rank}", spec.config)
    try:
        prepare(spec.config)
        transport = own_transport(spec.config, spec.agent_name)
        runner = _Stepper(spec, steps).runner()
        endpoint = transport.register(runner.pool)
    except (EngineStartError, TransportUnavailable) as error:
        field, reason = (error.field, error.reason) if isinstance(error, EngineStartError) else ("transport", error)
        rank0.send(NotJoined(field, str(reason)))
        os._exit(1)  # other threads may wait for ranks that never come
    rank = LocalRank(transport, runner.part, runner.fingerprints, runner.folding)
    copies = PartCopies(runner.part, runner, memory, rank)
    rank0.send(Joined(endpoint, transport.name))
    spare_the_started()
    try:
        serve_part(rank0, rank, copies, runner.fingerprints, runner.copy_block)
    except (EOFError, OSError):
        os._exit(0)  # readers of the pool see a process that ended, as with rank 0
    except BaseException:
        log.exception("rank %d cannot go on", spec.rank)
        os._exit(1)  # an ordinary end would wait for threads that copy, of which one may hang
