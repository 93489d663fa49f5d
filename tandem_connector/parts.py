"""Parts of blocks in vLLM's worker processes, as the engine process uses them.

    worker process (one for each rank)                 engine process
    register_kv_caches
    get_handshake_metadata: listens ──PartAddress──▶   set_xfer_handshake_metadata: connects
    makes its memory, opens its transport ◀─PartOrder─
                                          ──Joined──▶  whole blocks: `RankedKvMemory`
    reads, fingerprints                   ◀────────▶   `PartLink`

With vLLM's executor `uni` both ends are in one process. The socket is a file that only this user may open.
"""

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.platforms import current_platform

from cluster.errors import StartError
from engine.backends.vllm.connector import Offered
from engine.backends.vllm.identity import num_kv_heads
from engine.backends.vllm.kv.groups import KvGroups
from engine.backends.vllm.kv.memory import RankedKvMemory, joined_memory
from engine.backends.vllm.kv.stages import Stage, StagePool, stages_of
from engine.block_parts.messages import FromFollower, Joined, NotJoined
from engine.block_parts.part_service import EngineLink, PartCopies, SharedMemory, serve_part
from engine.process.ranks.ranks import DistantLink
from kvtransfer.errors import TransportUnavailable
from kvtransfer.hardware.topology import use_nearest_nics
from kvtransfer.ranks import RankGrid
from kvtransfer.registry import open_transport
from loans.reads.block_reads import LocalRank
from tandem_connector.settings import EXTRA

log = logging.getLogger(__name__)

JOIN_S = 120.0
"""Seconds for all ranks to open their transports."""


@dataclass
class PartAddress(KVConnectorHandshakeMetadata):
    """Address at which a rank serves its part, and facts about its KV memory."""

    path: str
    pool: StagePool


@dataclass(frozen=True, slots=True)
class PartOrder:
    """Order of the engine process to a rank: how to serve its part."""

    unit: int
    """Tokens of a block key."""
    ranks: int
    """Unlike parts of a stage's blocks."""
    rank: int
    stage: Stage | None
    attention: tuple[str, ...]
    """Names of the attention classes of all stages."""
    agent_name: str
    transport: str
    host: str


class _Link(EngineLink):
    """The engine process; when it is gone, vLLM ends this process."""

    def send(self, message: FromFollower) -> None:
        with self._lock:
            self.connection.send(message)


class RankPart:
    """This process's part, served on a thread from `listen` on."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, offered: Offered) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._offered = offered
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-part-"))  # only this user may enter it

    def listen(self) -> PartAddress:
        listener = Listener(str(self._folder / "socket"))
        threading.Thread(target=self._serve, args=(listener,), name="tandem-part", daemon=True).start()
        return PartAddress(
            str(self._folder / "socket"), self._offered.stage_pool(self._vllm_config, self._kv_cache_config)
        )

    def _serve(self, listener: Listener) -> None:
        connection = listener.accept()
        assert isinstance(connection, Connection)
        listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        engine = _Link(connection)
        try:
            order: PartOrder = connection.recv()
            serve = self._open(engine, order)
            if serve is not None:
                serve()
        except (EOFError, OSError):
            log.info("the engine process is gone")
        except BaseException:
            log.exception("this rank's KV memory is served no more")
            connection.close()
            raise

    def _open(self, engine: EngineLink, order: PartOrder) -> Callable[[], None] | None:
        """Return the function that serves the part; None where it cannot be served, which the engine is told."""
        try:
            on_gpu = not current_platform.is_cpu()
            if on_gpu:
                current_platform.set_device(_device_of(self._offered.caches))  # a new thread begins on the first one
                if (chosen := use_nearest_nics(os.environ)) is not None:
                    log.info(chosen)
            config = self._vllm_config
            memory = self._offered.memory(
                config, self._kv_cache_config, order.unit, None, order.ranks, order.rank, order.stage, order.attention
            )
            transport = open_transport(order.transport, order.agent_name, order.host, (), on_gpu)
            endpoint = transport.register(memory.pool)
        except TransportUnavailable as error:
            engine.send(NotJoined(f"{EXTRA}.transport", str(error)))
            return None
        except StartError as error:
            engine.send(NotJoined(error.field, error.reason))
            return None
        rank = LocalRank(transport, memory.part, memory.part_fingerprints)
        copies = PartCopies(memory.part, memory, None, rank)
        engine.send(Joined(endpoint, transport.name, memory.layout, memory.num_blocks, memory.part))
        return lambda: serve_part(engine, rank, copies, memory.part_fingerprints, settle=self._offered.wait_for_drafts)


def _device_of(caches: Mapping[str, Any]) -> Any:
    first = next(iter(caches.values()))
    return (first if hasattr(first, "device") else first[0]).device


class EngineParts:
    """All ranks of an engine, as its engine process sees them."""

    def __init__(self, vllm_config: Any, addresses: Mapping[tuple[int, int], Any], on_lost: Callable[[], None]) -> None:
        """Connect to the ranks, which are keyed by pipeline and tensor-parallel rank. Raises StartError."""
        self._vllm_config = vllm_config
        parallel = vllm_config.parallel_config
        self._addresses = [addresses[place] for place in sorted(addresses)]
        tensor = int(parallel.tensor_parallel_size)
        stages = int(parallel.pipeline_parallel_size)
        self.replicas = max(1, tensor // num_kv_heads(vllm_config.model_config))
        self.parts = tensor // self.replicas
        """Unlike parts of a stage's blocks."""
        self.grid = RankGrid(tensor * stages, stages, self.replicas)
        if len(self._addresses) != self.grid.ranks:
            reason = f"{len(self._addresses)} of {self.grid.ranks} ranks have the connector"
            raise StartError("kv_transfer_config", f"{reason}; the executors uni and mp are supported")
        self._memory = SharedMemory()
        self.links = [
            DistantLink(rank, _connect(each.path), self._memory, on_lost) for rank, each in enumerate(self._addresses)
        ]

    def open(self, unit: int, groups: KvGroups, name: str, transport: str, host: str) -> RankedKvMemory:
        """Have all ranks serve blocks of `unit` tokens; return the KV memory. Raises StartError."""
        stages: list[Stage | None] = [None]
        attention: set[str] = set()
        per_stage = self.grid.ranks // self.grid.stages
        if self.grid.stages > 1:
            pools = [each.pool for each in self._addresses[::per_stage]]
            layout = self._vllm_config.cache_config.get_resolved_kv_cache_layout()
            stages = [*stages_of(pools, not layout.is_block_outermost)]
            attention = {each for pool in pools for each in pool.attention}
        for rank, link in enumerate(self.links):
            stage, of_heads = divmod(rank, per_stage)
            order = PartOrder(
                unit,
                self.parts,
                of_heads // self.replicas,
                stages[stage],
                tuple(sorted(attention)),
                f"{name}-{rank}",
                transport,
                host,
            )
            link.send_order(order)
        joined = [self._joined(link) for link in self.links]
        for link in self.links:
            link.wait_joined()
        return joined_memory(joined, self.links, groups, self.grid, stages, self._memory.take)

    def close(self) -> None:
        for link in self.links:
            link.close()

    def _joined(self, link: DistantLink) -> Joined:
        try:
            return link.joined.result(JOIN_S)
        except TimeoutError:
            raise StartError(f"{EXTRA}.transport", f"rank {link.rank} did not open it in {JOIN_S:.0f} s") from None


def _connect(path: str) -> Connection:
    connection = Client(path)
    assert isinstance(connection, Connection)
    return connection


def check_ranks(vllm_config: Any) -> None:
    """Raise StartError for ways to spread a model that loans do not know."""
    parallel = vllm_config.parallel_config
    backend = parallel.distributed_executor_backend
    if backend not in (None, "uni", "mp"):
        name = backend if isinstance(backend, str) else getattr(backend, "__name__", str(backend))
        raise StartError("distributed_executor_backend", f"{name} is not supported by TandemConnector: take uni or mp")
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size", "nnodes"):
        if (size := int(getattr(parallel, field, 1))) > 1:
            raise StartError(field, f"{size} is not supported by TandemConnector: it must be 1")
