"""The torch engine, as the rest of Tandem sees it."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cluster.install import needing
from cluster.roles import Role
from engine.backends.torch.settings import TorchSettings
from engine.engine_kind import (
    OFF,
    RANKS_OF_ONE_HOST,
    EngineMemory,
    Installation,
    MemoryOptions,
    Option,
    RunnerKind,
)
from engine.errors import EngineStartError
from engine.host.core_allocation import CoreAllocation
from engine.host.core_sharing import CoreShare
from engine.host.cpu_affinity import num_available
from engine.host.memory import belongs_in_file
from engine.model.quantization import ONLY_ON_CPUS
from engine.model_runner import RankInfo
from engine.settings import max_step_tokens
from engine.speculation.speculator import NGRAM

if TYPE_CHECKING:
    from engine.backends.torch.runner import TorchRunner

log = logging.getLogger(__name__)


class TorchMemory(EngineMemory[TorchSettings]):
    """Memory of the torch engine."""

    quantised_on_gpu = False
    format_bits = MappingProxyType({"int8": 8.0, "int4": 4.5})  # int4 has a 16-bit scale for 32 weights

    def options(self, config: TorchSettings) -> MemoryOptions:
        return MemoryOptions(None if config.weights == "auto" else Option(config.weights, "weights"))

    def narrowed(self, config: TorchSettings, weights: str) -> dict[str, Any]:
        if weights == "fp8":
            as_saved = {} if config.weights == "auto" else {"weights": "auto"}
            return as_saved | {"engine": "vllm", "vllm_args": "--quantization fp8"}
        return {"weights": weights} if config.weights == "auto" else {}


class TorchKind(RunnerKind[TorchSettings]):
    """A transformers model, computed by Tandem."""

    name = "torch"
    settings = TorchSettings
    memory = TorchMemory()
    installation = Installation(packages=("torch",), kernels="engine.backends.torch.native.speed")
    reads_weight_files = True
    refused_settings = MappingProxyType(
        {
            **RANKS_OF_ONE_HOST,
            "adapters": "the torch engine serves no unmerged adapters: set lora to merge one, or engine: vllm",
        }
    )

    def refusals(self, config: TorchSettings, role: Role) -> Iterator[EngineStartError]:
        yield from super().refusals(config, role)
        if config.device == "cuda" and config.weights != "auto":
            yield EngineStartError("weights", f"{config.weights} {ONLY_ON_CPUS}")
        if config.tensor_parallel > 1:
            others = {
                f"weights: {config.weights}": config.weights != "auto",
                "lora": config.lora is not None,
                "a draft model in speculation": self._draft(config, role) is not None,
            }
            if unsupported := [name for name, is_set in others.items() if is_set]:
                reason = f"{config.tensor_parallel} cannot be combined with {', '.join(unsupported)}"
                yield EngineStartError("tensor_parallel", reason)

    def speculates(self, config: TorchSettings, role: Role) -> str:
        """Return off, ngram, or the directory of a draft model.

        A prefill worker has ngram in case it becomes a decode worker, since a draft model would occupy memory
        meanwhile.
        """
        chosen = config.speculation or NGRAM
        return NGRAM if role == "prefill" and chosen != OFF else chosen

    def _draft(self, config: TorchSettings, role: Role) -> Path | None:
        """Return the draft model's directory, or None without a draft model."""
        chosen = self.speculates(config, role)
        return None if chosen in (OFF, NGRAM) else Path(chosen)

    def finds_own_cores(self, config: TorchSettings) -> bool:
        """Return whether an engine with these settings takes part in the host's core allocation.

        With `cores` set it is avoided by others; without, it also avoids them. A container with a quota below the
        cores it sees cannot know which of them others leave to it.
        """
        if config.cores:
            return True
        return (config.threads, config.tensor_parallel) == (None, 1) and num_available() >= len(os.sched_getaffinity(0))

    def open_core_allocation(self, config: TorchSettings, role: Role) -> CoreAllocation | None:
        if not self.finds_own_cores(config):
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

    def open_runner(
        self,
        config: TorchSettings,
        role: Role,
        rank: RankInfo | None = None,
        core_allocation: CoreAllocation | None = None,
    ) -> "TorchRunner":
        """Open the runner on the calling thread, which must be the one that uses it, bound to its cores.

        As one of several ranks it waits for the others. Raises EngineStartError.
        """
        with needing("engine", EngineStartError):
            from engine.backends.torch.device import choose_device, gpu_of
            from engine.backends.torch.kv.room import KvRoom
            from engine.backends.torch.runner import TorchRunner, set_threads

        share = CoreShare(config.cores or (), config.shared_cores)
        threads = config.num_threads
        # After torch is loaded: the cores of a process when it loads OpenMP decide for good how many threads wait
        # actively.
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
            self._draft(config, role),
            config.quantization(),
            rank,
            belongs_in_file(role),
            KvRoom(max_step_tokens(config, gpu), config.host_kv_bytes),
        )
        if threads == len(share.own):
            runner.bind(share.own, share.shared)
        return runner


KIND = TorchKind()
