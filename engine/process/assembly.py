"""Assembly of an engine core from a worker's configuration, in whatever process it runs."""

from collections.abc import Callable

from engine.core.engine_core import EngineCore
from engine.core.loan_host import EngineLimits
from engine.core_types import GpuDevice
from engine.engine_kind import OFF
from engine.kv.rows import private_rows
from engine.kv.store.opening import open_stores
from engine.lending.fast_path import FastPathLink
from engine.messages.from_engine import FromEngine
from engine.model_runner import ModelRunner
from engine.process.ranks.follower_ranks import FollowerRanks
from engine.process.spec import EngineSpec
from engine.settings import step_budget
from engine.speculation.speculator import NGRAM, DraftModelProposer, NgramProposer, Speculator
from kvtransfer.transport import Transport

IDLE_TURN_S = 0.15
"""Longest pause of an engine's loop, in seconds; it makes load reports serve as heartbeats."""


def open_core(
    spec: EngineSpec,
    runner: ModelRunner,
    transport: Transport,
    emit: Callable[[FromEngine], None],
    wake: Callable[[], None] = lambda: None,
    ranks: FollowerRanks | None = None,
    fast_path: FastPathLink | None = None,
) -> EngineCore:
    """Create the engine core.

    `ranks` are those besides this process's. Raises EngineStartError.

    `fast_path` links to other engines.
    """
    config = spec.config
    fingerprint = runner.layout.fingerprint(runner.info.weights_fingerprint)
    allocate = private_rows if ranks is None else ranks.memory.take
    stores = open_stores(config, runner.layout, fingerprint, allocate)
    others = () if ranks is None else ranks.followers
    speculator = _open_speculator(spec, runner)
    limits = limits_of(spec, runner.gpu)
    return EngineCore(
        runner, transport, limits, emit, wake, stores, speculator=speculator, others=others, fast_path=fast_path
    )


def open_bare_core(
    spec: EngineSpec,
    runner: ModelRunner,
    transport: Transport,
    emit: Callable[[FromEngine], None],
    wake: Callable[[], None],
    ranks: FollowerRanks | None,
) -> EngineCore:
    """Create an engine core whose blocks never leave the pool, for a warm-up."""
    others = () if ranks is None else ranks.followers
    speculator = _open_speculator(spec, runner)
    return EngineCore(runner, transport, limits_of(spec, runner.gpu), emit, wake, speculator=speculator, others=others)


def limits_of(spec: EngineSpec, gpu: GpuDevice | None) -> EngineLimits:
    """Return the limits that a worker's settings set, or else its device."""
    config = spec.config
    return EngineLimits(
        step_budget(config, spec.role, gpu),
        max_queued_loans=config.max_queued_loans,
        reserve_output_tokens=config.reserve_output_tokens,
        read_silence_s=config.peer_silence_s,
    )


def _open_speculator(spec: EngineSpec, runner: ModelRunner) -> Speculator | None:
    if (chosen := spec.config.kind.speculates(spec.config, spec.role)) == OFF:
        return None
    return Speculator(
        NgramProposer() if chosen == NGRAM else DraftModelProposer(runner), spec.config.speculation_tokens
    )
