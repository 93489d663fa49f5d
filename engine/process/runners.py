"""Model runners as the settings name them.

A follower rank needs nothing else of an engine.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.install import needing
from cluster.roles import Role
from engine.backends.sim.runner import SimRunner, sim_runner
from engine.config import OWN_ENGINES, WorkerConfig, finds_own_cores, max_step_tokens
from engine.errors import EngineStartError
from engine.host.core_allocation import CoreAllocation
from engine.host.core_sharing import CoreShare
from engine.host.memory import UNMEASURED_KV_BYTES, belongs_in_file
from engine.model.adapters import read_adapters
from engine.model_runner import ModelRunner
from engine.process.spec import RankSpec
from engine.process.start_up import num_threads
from kvtransfer.plugins import load_plugin, plugin_names

if TYPE_CHECKING:
    from engine.backends.torch.runner import TorchRunner

log = logging.getLogger(__name__)

GROUP = "tandem.engines"
"""Group of the entry points that name engines of other packages."""
OpenRunner = Callable[[WorkerConfig, Role], ModelRunner]
"""Function that such an entry point names. It loads the model on the thread that will compute.

Raises EngineStartError, or StartError, naming the setting at fault."""


def open_plugin_runner(config: WorkerConfig, role: Role) -> ModelRunner:
    """Open the runner of an engine of another package.

    Raises EngineStartError where no installed package has it.
    """
    open_runner: OpenRunner | None = load_plugin(GROUP, config.engine)
    if open_runner is None:
        installed = ", ".join([*OWN_ENGINES, *plugin_names(GROUP)])
        raise EngineStartError("engine", f"unknown engine {config.engine!r}; installed are {installed}")
    return open_runner(config, role)


def open_sim_runner(config: WorkerConfig, pool_in_file: bool = False) -> SimRunner:
    runner = sim_runner(
        config.model,
        config.block_tokens,
        config.kv_bytes or UNMEASURED_KV_BYTES,
        config.sim_timing(),
        config.sim_block_kib,
        reads_all=config.sim_reads == "all",
        pool_in_file=pool_in_file,
    )
    adapters = tuple((adapter.name, adapter.fingerprint) for adapter in read_adapters(config.adapters))
    runner.info = replace(runner.info, adapters=adapters)
    return runner


def open_core_allocation(config: WorkerConfig, role: Role) -> CoreAllocation | None:
    """Open the core allocation of an engine; None when it computes on a GPU or was told its cores.

    Raises EngineStartError.
    """
    if not finds_own_cores(config):
        return None
    with needing("engine", EngineStartError):
        from engine.backends.torch.device import choose_device

    if choose_device(config.device).type != "cpu":
        return None
    try:
        return CoreAllocation(role, config.cores or ())
    except OSError as error:
        log.warning("other engines of this host do not see this one, and may compute on the same cores: %s", error)
        return None


def open_torch_runner(
    config: WorkerConfig,
    role: Role,
    draft: Path | None = None,
    rank: RankSpec | None = None,
    core_allocation: CoreAllocation | None = None,
) -> "TorchRunner":
    """Open the torch runner on the calling thread, which must be the one that uses it, bound to its cores.

    As one of several ranks it waits for the others and takes its share of `config`. Raises EngineStartError.
    """
    with needing("engine", EngineStartError):
        from engine.backends.torch.device import choose_device, gpu_of
        from engine.backends.torch.kv_room import KvRoom
        from engine.backends.torch.ranks import RankInfo
        from engine.backends.torch.runner import TorchRunner, set_threads

    share = CoreShare(config.cores or (), config.shared_cores)
    threads = num_threads(config)
    # After torch is loaded: the cores of a process when it loads OpenMP decide for good how many threads wait actively.
    if core_allocation is not None and (settled := core_allocation.settle()) is not None:
        share, threads = settled, len(settled.own)
    set_threads(threads)
    gpu = gpu_of(choose_device(config.device, rank.rank if rank is not None else None))
    runner = TorchRunner(
        config.model,
        config.dtype,
        config.block_tokens,
        config.kv_bytes,
        config.backend,
        config.device,
        draft,
        config.quantization(),
        RankInfo(rank.rank, rank.ranks, rank.meeting) if rank is not None else None,
        belongs_in_file(role),
        KvRoom(max_step_tokens(config, gpu), config.host_kv_bytes),
    )
    if threads == len(share.own):
        runner.bind(share.own, share.shared)
    return runner
