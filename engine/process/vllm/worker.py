"""Tandem's part of vLLM's worker processes, one for each rank of an engine with several.

vLLM imports this module in a worker process before it makes the worker, because `worker_extension_cls` names it. The
process then connects to the engine process, takes its settings, and reports why it cannot start if it cannot. After
vLLM's start a call, `tandem_serve`, starts a thread that serves the rank's part of every block; with pipeline stages
`tandem_pool` comes before it. vLLM runs calls of its workers one after the other with its steps, so no further call is
made.
"""

import logging
import multiprocessing
import os
import pickle
import re
import threading
from collections.abc import Sequence
from multiprocessing import reduction, util
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from cluster.errors import StartError
from cluster.logs import set_up
from cluster.process.memory import spare_the_started
from engine.backends.vllm.arguments import quiet_vllm
from engine.backends.vllm.connector import offered
from engine.backends.vllm.kv.memory import VllmKvMemory
from engine.backends.vllm.kv.stages import Stage, StagePool
from engine.backends.vllm.sampling.speculation import COUPLED
from engine.block_parts.messages import Joined, NotJoined
from engine.block_parts.part_service import EngineLink, MappedMemory, PartCopies, serve_part
from engine.host.cores import stay_on
from engine.process.ranks.nodes import RankHello, address_of, connect_to, key_of
from engine.process.ranks.worker_ranks import ADDRESS
from engine.process.spec import EngineSpec, RankSpec
from engine.process.start_up import become_child, own_transport
from engine.process.vllm.node import NODE_SPEC
from engine.process.vllm.start import why_not_started
from kvtransfer.errors import TransportUnavailable
from loans.reads.block_reads import LocalRank

log = logging.getLogger(__name__)

EXIT_PRIORITY = 100
"""Priority of an end without clean-up among multiprocessing's finalizers: the first of all."""
_EXECUTOR = "vllm.v1.executor.multiproc_executor"
"""Logger to which vLLM's worker process gives the exception that ends its start."""


class _Failures(logging.Handler):
    """Handler that tells the engine process why this process cannot start."""

    def __init__(self, engine: EngineLink) -> None:
        super().__init__(logging.ERROR)
        self._engine = engine

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            failure = why_not_started(record.exc_info[1])
            self._engine.send(NotJoined(failure.field, failure.reason))


class _Part:
    """This process, as one rank of the engine."""

    def __init__(self) -> None:
        """Connect to the engine process and take this rank's settings.

        Raises EngineStartError.
        """
        # An ordinary end, after vLLM's, would wait for threads that copy and for the transport's.
        util.Finalize(None, os._exit, args=(0,), exitpriority=EXIT_PRIORITY)
        become_child()  # vLLM's own watch of its parent begins only after its start
        parent = multiprocessing.parent_process()
        if parent is None or parent.pid != os.getppid():
            os._exit(1)  # the engine process ended before this one was its child
        quiet_vllm()
        if COUPLED in os.environ:
            from engine.backends.vllm.sampling.verification import couple_verification

            couple_verification()
        rank = re.fullmatch(r"VllmWorker-(\d+)", multiprocessing.current_process().name)
        assert rank is not None, "vLLM names its worker processes differently"
        connect = self._connect_to_node_0 if NODE_SPEC in os.environ else self._connect
        self.spec, connection, self._memory = connect(int(rank[1]))
        self._engine = EngineLink(connection)
        self._failures = _Failures(self._engine)
        logging.getLogger(_EXECUTOR).addHandler(self._failures)
        set_up(self.spec.engine.role, f"{self.spec.engine.worker_id}/rank {self.spec.rank}", self.spec.config)
        if self.spec.config.cores:
            stay_on(self.spec.config.cores)

    def _connect(self, rank: int) -> tuple[RankSpec, Connection, MappedMemory | None]:
        connection = Client(os.environ[ADDRESS])
        assert isinstance(connection, Connection)
        connection.send(rank)
        return connection.recv(), connection, MappedMemory(reduction.recv_handle(connection))

    def _connect_to_node_0(self, rank: int) -> tuple[RankSpec, Connection, MappedMemory | None]:
        """Connect to the engine process of node 0; settings are those of this node."""
        spec: EngineSpec = pickle.loads(Path(os.environ[NODE_SPEC]).read_bytes())
        connection = connect_to(address_of(spec.config), key_of(spec.config))
        connection.send(RankHello(rank))
        return RankSpec(spec, rank), connection, None

    def serve(self, memory: VllmKvMemory, device: Any) -> None:
        """Start the thread that serves this rank's KV memory on `device`."""
        logging.getLogger(_EXECUTOR).removeHandler(self._failures)
        threading.Thread(target=self._serve, args=(memory, device), name="rank-service", daemon=True).start()

    def fail(self, error: Exception) -> None:
        """Tell the engine process that this rank cannot be served."""
        failure = why_not_started(error)
        self._engine.send(NotJoined(failure.field, failure.reason))

    def _serve(self, memory: VllmKvMemory, device: Any) -> None:
        try:
            if not current_platform.is_cpu():
                current_platform.set_device(device)  # a new thread begins on the first one
            transport = own_transport(self.spec.config, self.spec.agent_name)
            endpoint = transport.register(memory.pool)
            rank = LocalRank(transport, memory.part, memory.part_fingerprints)
            copies = PartCopies(memory.part, memory, self._memory, rank)
        except TransportUnavailable as error:
            self._engine.send(NotJoined("transport", str(error)))
            return
        except Exception as error:
            log.exception("this rank cannot be served")
            self.fail(error)
            return
        self._engine.send(Joined(endpoint, transport.name, memory.layout, memory.num_blocks, memory.part))
        spare_the_started()
        try:
            serve_part(self._engine, rank, copies, memory.part_fingerprints, settle=offered.wait_for_drafts)
        except (EOFError, OSError):
            os._exit(0)  # the engine process is gone
        except BaseException:
            log.exception("rank %d cannot go on", self.spec.rank)
            os._exit(1)  # the engine process notices, and ends too


class TandemWorker:
    """Extension of vLLM's worker class."""

    def tandem_pool(self) -> StagePool:
        """Return facts about this rank's KV memory."""
        worker: Any = self
        return offered.stage_pool(worker.vllm_config, worker.model_runner.kv_cache_config)

    def tandem_serve(
        self, unit: int, replicas: int, stages: Sequence[Stage | None] = (None,), attention: Sequence[str] = ()
    ) -> None:
        """Start to serve this rank's part of blocks of `unit` tokens; the engine process is told the outcome.

        So many `replicas` in a row hold the same part. Layers of all pipeline `stages` are of the classes `attention`.
        """
        worker: Any = self
        spec = _part.spec
        stage, of_heads = divmod(spec.rank, spec.ranks // len(stages))
        ranks = spec.ranks // len(stages) // replicas
        try:
            config = worker.model_runner.kv_cache_config
            memory = offered.memory(
                worker.vllm_config, config, unit, None, ranks, of_heads // replicas, stages[stage], attention
            )
        except StartError as error:
            _part.fail(error)
            return
        _part.serve(memory, worker.device)


_part = _Part()
