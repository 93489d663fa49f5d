"""The sim engine, as the rest of Tandem sees it."""

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from cluster.roles import Role
from engine.backends.sim.settings import SimSettings
from engine.engine_kind import ONE_RANK, EngineMemory, RunnerKind
from engine.host.memory import UNMEASURED_KV_BYTES, belongs_in_file
from engine.model.adapters import read_adapters
from engine.model.hub import CONFIG_FILES

if TYPE_CHECKING:
    from engine.backends.sim.media_processor import SimMediaProcessor
    from engine.backends.sim.runner import SimRunner
    from engine.host.cores import CoreAllocation


class SimMemory(EngineMemory[SimSettings]):
    """Memory of the sim engine."""

    needs_shape = False

    def block_bytes(self, config: SimSettings) -> float:
        return float(config.sim_block_kib << 10) * config.block_tokens / 16


class SimKind(RunnerKind[SimSettings]):
    """A simulated model whose tokens are hashes of KV."""

    name = "sim"
    settings = SimSettings
    memory = SimMemory()
    model_files = CONFIG_FILES
    may_use_gpu = False
    warms_up = False  # nothing is slow at first
    refused_settings = MappingProxyType(
        {name: reason for name, reason in ONE_RANK.items() if name != "data_parallel"}  # each steps by itself
    )
    lacking = MappingProxyType(
        {"structured output": "the sim engine cannot follow a grammar: its tokens are hashes of its KV blocks"}
    )

    def open_runner(
        self, config: SimSettings, role: Role, core_allocation: "CoreAllocation | None" = None
    ) -> "SimRunner":
        return open_sim_runner(config, belongs_in_file(role))

    def open_media_processor(self, config: SimSettings) -> "SimMediaProcessor":
        from engine.backends.sim.media_processor import SimMediaProcessor
        from engine.model.model_dir import ModelDir

        return SimMediaProcessor(ModelDir.open(config.model))


def open_sim_runner(config: SimSettings, pool_in_file: bool = False) -> "SimRunner":
    """Open the runner; `pool_in_file`: other processes may map its pool.

    Raises EngineStartError.
    """
    from engine.backends.sim.runner import sim_runner

    runner = sim_runner(
        config.model,
        config.block_tokens,
        config.kv_bytes or UNMEASURED_KV_BYTES,
        config.timing(),
        config.sim_block_kib,
        reads_all=config.sim_reads == "all",
        pool_in_file=pool_in_file,
    )
    adapters = tuple((adapter.name, adapter.fingerprint) for adapter in read_adapters(config.adapters))
    runner.info = replace(runner.info, adapters=adapters)
    return runner


KIND = SimKind()
