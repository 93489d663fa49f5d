"""Assembly of an engine core from a worker's configuration, in whatever process it runs."""

import logging
from collections.abc import Callable

from cluster.network.tls import member_of
from engine.core.engine_core import EngineCore
from engine.core.loan_host import EngineLimits
from engine.core_types import GpuDevice
from engine.messages.from_engine import FromEngine
from engine.model_runner import ModelRunner
from engine.process.spec import EngineSpec
from engine.settings import step_budget
from kvcache.store.local import open_stores
from kvtransfer.transport import Transport
from loans.network import LoanNetwork
from loans.peers.socket_network import NetworkSettings, SocketNetwork
from loans.peers.sockets import Watcher

log = logging.getLogger(__name__)


IDLE_TURN_S = 0.15
"""Longest pause of an engine's loop, in seconds; it makes load reports serve as heartbeats."""


def open_core(
    spec: EngineSpec,
    runner: ModelRunner,
    transport: Transport,
    emit: Callable[[FromEngine], None],
    wake: Callable[[], None] = lambda: None,
    network: LoanNetwork | None = None,
) -> EngineCore:
    """Create the engine core.

    `network` is the way to other engines. Raises EngineStartError.
    """
    config = spec.config
    fingerprint = runner.layout.fingerprint(runner.info.weights_fingerprint)
    stores = open_stores(config, runner.layout, fingerprint)
    limits = limits_of(spec, runner.gpu)
    return EngineCore(runner, transport, limits, emit, wake, stores, network=network)


def open_bare_core(
    spec: EngineSpec,
    runner: ModelRunner,
    transport: Transport,
    emit: Callable[[FromEngine], None],
    wake: Callable[[], None],
) -> EngineCore:
    """Create an engine core whose blocks never leave the pool, for a warm-up."""
    return EngineCore(runner, transport, limits_of(spec, runner.gpu), emit, wake)


def open_network(spec: EngineSpec, watcher: Watcher) -> SocketNetwork:
    """Create the network of an engine's process, which `watcher`, its loop, drives. Raises StartError."""
    config = spec.config
    settings = NetworkSettings(
        spec.worker_id,
        spec.incarnation,
        config.host,
        config.loan_port,
        config.advertise_host,
        config.peer_silence_s,
        member_of(config),
    )
    return SocketNetwork(settings, watcher)


def limits_of(spec: EngineSpec, gpu: GpuDevice | None) -> EngineLimits:
    """Return the limits that a worker's settings set, or else its device."""
    config = spec.config
    return EngineLimits(
        step_budget(config, spec.role, gpu),
        max_queued_loans=config.max_queued_loans,
        reserve_output_tokens=config.reserve_output_tokens,
        read_silence_s=config.peer_silence_s,
    )
