"""The torch engine, as the rest of Tandem sees it."""

import logging
import os
from types import MappingProxyType
from typing import TYPE_CHECKING

from cluster.install import needing
from cluster.roles import Role
from engine.backends.torch.settings import TorchSettings
from engine.engine_kind import ONE_RANK, Installation, RunnerKind
from engine.errors import EngineStartError
from engine.host.cores import CoreAllocation, CoreShare, num_available
from engine.host.memory import belongs_in_file
from engine.settings import max_step_tokens

if TYPE_CHECKING:
    from engine.backends.torch.runner import TorchRunner

log = logging.getLogger(__name__)


class TorchKind(RunnerKind[TorchSettings]):
    """A transformers model, computed by Tandem on CPUs."""

    name = "torch"
    settings = TorchSettings
    installation = Installation(packages=("torch",), kernels="engine.backends.torch.native.speed")
    reads_weight_files = True
    may_use_gpu = False
    refused_settings = MappingProxyType(
        {**ONE_RANK, "adapters": "the torch engine serves no adapters: set engine: vllm"}
    )

    def finds_own_cores(self, config: TorchSettings) -> bool:
        """Return whether an engine with these settings takes part in the host's core allocation.

        With `cores` set it is avoided by others; without, it also avoids them. A container with a quota below the
        cores it sees cannot know which of them others leave to it.
        """
        return bool(config.cores) or (config.threads is None and num_available() >= len(os.sched_getaffinity(0)))

    def open_core_allocation(self, config: TorchSettings, role: Role) -> CoreAllocation | None:
        if not self.finds_own_cores(config):
            return None
        try:
            return CoreAllocation(role, config.cores or ())
        except OSError as error:
            log.warning("other engines of this host do not see this one, and may compute on the same cores: %s", error)
            return None

    def open_runner(
        self, config: TorchSettings, role: Role, core_allocation: CoreAllocation | None = None
    ) -> "TorchRunner":
        """Open the runner on the calling thread, which must be the one that uses it, bound to its cores.

        Raises EngineStartError.
        """
        with needing("engine", EngineStartError):
            from engine.backends.torch.kv import KvRoom
            from engine.backends.torch.runner import TorchRunner, set_threads

        share = CoreShare(config.cores or (), config.shared_cores)
        threads = config.num_threads
        # After torch is loaded: the cores of a process when it loads OpenMP decide for good how many threads wait
        # actively.
        if core_allocation is not None and (settled := core_allocation.settle()) is not None:
            share, threads = settled, len(settled.own)
        set_threads(threads)
        runner = TorchRunner(
            config.model,
            config.dtype,
            config.block_tokens,
            config.kv_bytes,
            config.backend,
            belongs_in_file(role),
            KvRoom(max_step_tokens(config, None), config.host_kv_bytes),
        )
        if threads == len(share.own):
            runner.bind(share.own, share.shared)
        return runner


KIND = TorchKind()
