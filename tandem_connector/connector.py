"""The connector that vLLM loads: loans between stock vLLM servers.

vLLM makes one object in its engine process and one in each worker process. The engine's has `SchedulerHalf` and the
thread of loans; a worker's serves its rank's part of KV memory (`parts.py`). What is borrowed enters vLLM's prefix
cache before the request is scheduled, so the connector loads and saves nothing, and no request fails with it.

Lock around vLLM's block pool, which two threads use: vLLM's, and that of loans.

vLLM's scheduler looks how many blocks are free and then takes them. So these calls hold the lock:

- `KVCacheManager.allocate_slots`, from its count to its allocation;
- every call of `BlockPool` that changes something.

The thread of loans takes references on cached blocks, drops references and names blocks. It never takes free blocks,
since that would give away cached blocks that vLLM has found and not taken yet.
"""

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.utils.network_utils import get_ip

from cluster.errors import StartError
from cluster.logs import OURS
from engine.backends.vllm.connector import MemoryConnector, Offered
from engine.backends.vllm.identity import kv_weights
from engine.backends.vllm.kv.groups import KvGroups
from engine.backends.vllm.kv.memory import RankedKvMemory, pool_allocation
from engine.model.model_dir import ModelDir
from kvtransfer.ranks import join_endpoints, with_planes, with_stages
from loans.component import Ranks
from loans.peers.socket_network import NetworkSettings, SocketNetwork
from tandem_connector.borrowings import BorrowingRules
from tandem_connector.contract import check_version
from tandem_connector.kv import ConnectorKv, Hashes, Naming
from tandem_connector.metrics import TandemPromMetrics, TandemStats
from tandem_connector.parts import EngineParts, RankPart, check_ranks
from tandem_connector.scheduler_half import EngineFacts, SchedulerHalf
from tandem_connector.servers import INCARNATION_BYTES, Servers
from tandem_connector.service import LoanThread, SocketWatcher
from tandem_connector.settings import ALL_ADDRESSES, ConnectorSettings

log = logging.getLogger(__name__)


READS = {"get_cached_block", "get_num_free_blocks", "get_usage", "is_block_writable"}
"""Calls of `BlockPool` that change nothing."""


def lock_pool(manager: Any, lock: "threading.RLock") -> None:
    """Have vLLM's KVCacheManager and its BlockPool hold the lock in calls that change blocks."""
    pool = manager.block_pool
    for name in [*(each for each in dir(type(pool)) if not each.startswith("_")), "_insert_block_hash"]:
        if name not in READS and callable(getattr(type(pool), name)):
            setattr(pool, name, _locked(getattr(pool, name), lock))
    manager.allocate_slots = _locked(manager.allocate_slots, lock)


def _locked(call: Callable[..., Any], lock: Any) -> Callable[..., Any]:
    @functools.wraps(call)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return call(*args, **kwargs)

    return locked


class TandemConnector(MemoryConnector):
    """Connector for `kv_transfer_config`; `settings.py` has its keys."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        self.offered = Offered()
        self._settings = ConnectorSettings.read(self._kv_transfer_config.kv_connector_extra_config)
        self.half: SchedulerHalf | None = None
        self._lock = threading.RLock()
        if role is KVConnectorRole.SCHEDULER:
            check_version(vllm.__version__)
            _check(vllm_config, self._settings)
            self._engine = _Engine(vllm_config, self._settings)

    # ------------------------------------------------------------------ a worker process

    def get_mem_pool_context(self) -> AbstractContextManager[None]:
        return pool_allocation(self._settings.kv_in_file, self.offered.pools)

    def get_handshake_metadata(self) -> Any:
        """Return where this rank serves its part of KV memory."""
        if get_kv_transfer_group() is not self:
            raise StartError("kv_connector", "TandemConnector runs alone, not within MultiConnector")
        return RankPart(self._vllm_config, self._kv_cache_config, self.offered).listen()

    # ------------------------------------------------------------------ the engine process

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        lock_pool(kv_cache_manager, self._lock)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Connect to all ranks, and begin to borrow and to lend. Raises StartError."""
        self.half = self._engine.start(self._kv_cache_manager, metadata, self._lock)

    def on_new_request(self, request: Any) -> None:
        if self.half is not None:
            with self._lock:
                self.half.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return None while the request borrows, so that vLLM skips it; then that nothing is left to load."""
        if self.half is None:
            return 0, False
        with self._lock:
            return (0 if self.half.may_schedule(request, num_computed_tokens) else None), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self.half is not None:
            with self._lock:
                self.half.allocated(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self.half is not None:
            with self._lock:
                self.half.scheduled(scheduler_output.total_num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if self.half is not None:
            with self._lock:
                self.half.step_ended()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self.half is None:
            return False, None
        with self._lock:
            return False, self.half.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def reset_cache(self) -> bool | None:
        if self.half is not None:
            with self._lock:
                self.half.reset()
        return True

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.half is None:
            return None
        with self._lock:
            return self.half.counters.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return TandemStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        return TandemPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End all loans."""
        if self.half is not None:
            self._engine.close()


class _Engine:
    """The engine's half while it starts and ends."""

    def __init__(self, vllm_config: Any, settings: ConnectorSettings) -> None:
        self._vllm_config, self._settings = vllm_config, settings
        self._watcher = SocketWatcher()

    def start(self, manager: Any, addresses: dict[tuple[int, int], Any], lock: Any) -> SchedulerHalf:
        """Begin to borrow and to lend. Raises StartError."""
        config, settings = self._vllm_config, self._settings
        transfer, parallel = config.kv_transfer_config, config.parallel_config
        incarnation = os.urandom(INCARNATION_BYTES)
        name = f"vllm-{incarnation.hex()[:12]}"
        rank = int(parallel.data_parallel_rank)
        unit = int(manager.block_pool.hash_block_size)
        self._parts = EngineParts(config, addresses, lambda: log.error("a worker process of vLLM is gone"))
        hashes = Hashes()
        groups = KvGroups(manager, unit, 0, self._parts.parts, hashes.of)
        host = settings.advertise_host or _own_address(settings.host)
        memory = self._parts.open(unit, groups, name, settings.transport, host)
        kv = ConnectorKv(memory, manager, groups, hashes, time.monotonic)
        network = SocketNetwork(
            NetworkSettings(
                name,
                incarnation,
                settings.host,
                settings.loan_port + rank if settings.loan_port else 0,
                host,
                settings.peer_silence_s,
                settings.trust(),
                settings.secret(),
            ),
            self._watcher,
        )
        model_fingerprint = kv.layout.fingerprint(kv_weights(_files_of(config), config))
        half: SchedulerHalf | None = None

        def deliver(call: Any) -> None:
            assert half is not None
            half.loans.post(call)

        self._servers = Servers(settings.api_key(), settings.lender_ca_file, deliver)
        half = SchedulerHalf(
            kv,
            Ranks(None, self._parts.links, self._parts.grid),
            self._parts.links[0].transport,
            network,
            Naming(model_fingerprint, unit),
            self._servers,
            EngineFacts(
                incarnation,
                int(config.model_config.get_vocab_size()),
                rank,
                int(parallel.tensor_parallel_size),
                transfer.is_kv_producer,
                settings.lenders,
                settings.trusted_lenders,
                settings.peer_silence_s,
                BorrowingRules(transfer.is_kv_consumer, settings.is_guarded, settings.min_tokens, settings.patience_s),
            ),
            self._watcher.wake,
            time.monotonic,
        )
        address = half.start(model_fingerprint, _endpoint_of(memory, [link.endpoint for link in self._parts.links]))
        self._thread = LoanThread(self._watcher, lock)
        self._thread.start(half)
        who = "peers with a certificate or the secret" if settings.is_guarded else "processes of this host"
        log.info("takes loans at %s from %s, in blocks of %d tokens", address, who, unit)
        return half

    def close(self) -> None:
        self._thread.close()
        self._servers.close()
        self._parts.close()


def _log_like_vllm() -> None:
    """Have log lines of this repository's packages appear among vLLM's."""
    of_vllm = logging.getLogger("vllm")
    for package in OURS:
        logger = logging.getLogger(package)
        logger.handlers, logger.propagate = list(of_vllm.handlers), not of_vllm.handlers
        logger.setLevel(of_vllm.getEffectiveLevel())


def _check(vllm_config: Any, settings: ConnectorSettings) -> None:
    """Raise StartError for what the connector cannot do, by the name of vLLM's option."""
    transfer = vllm_config.kv_transfer_config
    if settings.lenders and not transfer.is_kv_consumer:
        raise StartError("kv_role", f"{transfer.kv_role} borrows nothing, and lenders are set: take kv_both")
    if transfer.kv_connector != TandemConnector.__name__:
        raise StartError("kv_connector", f"TandemConnector runs alone, not within {transfer.kv_connector}")
    if not vllm_config.cache_config.enable_prefix_caching:
        reason = "must be on, since what is borrowed enters the prefix cache; vLLM turns it off for some models (so for"
        raise StartError("enable_prefix_caching", f"{reason} MLA on CPUs)")
    if vllm_config.model_config.enable_sleep_mode:
        raise StartError("enable_sleep_mode", "must be off: a server that sleeps gives its KV memory away")
    if transfer.is_kv_producer and not settings.is_guarded:
        log.warning("neither tls_ca nor secret_file is set: loans are given on loopback only")
    settings.check()
    check_ranks(vllm_config)


def _files_of(vllm_config: Any) -> bytes:
    """Return the fingerprint of the model's files. Raises StartError."""
    model = vllm_config.model_config
    path = Path(model.model)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        path = Path(
            snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=vllm_config.load_config.download_dir,
                local_files_only=True,
            )
        )
    return ModelDir.open(path).weights_fingerprint()


def _endpoint_of(memory: RankedKvMemory, endpoints: Sequence[bytes]) -> bytes:
    """Return the endpoint of whole blocks, from those of all ranks' parts."""
    joined = join_endpoints(endpoints[:: memory.grid.replicas])
    return with_stages(with_planes(joined, memory.layout.planes, memory.num_blocks), memory.shares)


def _own_address(host: str) -> str:
    """Return the address at which peers reach a listener at `host`."""
    return str(get_ip()) if host in ALL_ADDRESSES else host
