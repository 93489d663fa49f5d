"""Configuration of a worker, of either role and with any engine."""

import re
import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from pydantic import model_validator

from engine.backends.sim.settings import SimSettings
from engine.backends.torch.settings import TorchSettings
from engine.backends.vllm.settings import VllmSettings
from engine.engine_kind import ONE_RANK, EngineKind, find_kind, kind_of
from engine.errors import EngineStartError
from engine.settings import DEFAULT_ENGINE, PLUGIN_NAME

GONE: Mapping[str, str] = MappingProxyType(
    {
        "weights": "engine: vllm and vllm_args: --quantization fp8",
        "kv_dtype": "engine: vllm and vllm_options: {kv_cache_dtype: fp8}",
        "lora": "engine: vllm and adapters: {NAME: PATH}",
        "speculation": "engine: vllm and vllm_options: {speculative_config: {method: ngram}}",
        "speculation_tokens": "engine: vllm and vllm_options: {speculative_config: {num_speculative_tokens: 4}}",
        "device": "engine: vllm on a GPU, engine: torch on a CPU",
        "backend: flashinfer": "engine: vllm",
        "backend: triton": "engine: vllm",
    }
)
"""Settings of earlier versions, or a value of one, with what to set instead."""


class WorkerConfig(SimSettings, VllmSettings, TorchSettings):
    """Settings of a prefill or decode worker.

    An engine of another package may bring settings of its own: `settings` of its `EngineKind` is a subclass of this
    class, and `parse` returns an instance of it.
    """

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validate `values` by the settings of their engine.

        Raises StartError naming the first invalid field.
        """
        kind = _kind_in(values)
        if kind is not None and kind.settings is not cls and issubclass(kind.settings, cls):
            return kind.settings.parse(values)
        return super().parse(values)

    @property
    def kind(self) -> EngineKind[Any]:
        """Engine that these settings name.

        Raises EngineStartError where no installed package has it.
        """
        return kind_of(self.engine)

    @property
    def finds_own_cores(self) -> bool:
        """Whether the engine takes part in the host's core allocation."""
        return (kind := find_kind(self.engine)) is not None and kind.finds_own_cores(self)

    @property
    def group(self) -> str:
        """Name of the data-parallel group, unique in the cluster; empty for a worker that steps by itself."""
        if self.data_parallel == 1 or not self.kind.steps_in_group:
            return ""
        host = self.data_parallel_address
        is_local = host.startswith("127.") or host in ("localhost", "::1")
        return f"{socket.gethostname() if is_local else host}:{self.data_parallel_port}"

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, values: Any) -> Any:
        """Set what the engine's own settings stand for.

        Raises EngineStartError, also for a setting that is gone.
        """
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            for gone, what in ((name, "setting"), (f"{name}: {value}", "value")):
                if (instead := GONE.get(gone)) is not None:
                    raise EngineStartError(name, f"this {what} is gone: leave it out, or set {instead}")
        kind = _kind_in(values)
        return values if kind is None else kind.settled(values)

    @model_validator(mode="after")
    def _check_data_parallel(self) -> "WorkerConfig":
        """Raise EngineStartError for settings that do not go with a data-parallel group."""
        refused = ONE_RANK if (kind := find_kind(self.engine)) is None else kind.refused_settings
        if self.data_parallel > 1 and (reason := refused.get("data_parallel")) is not None:
            raise EngineStartError("data_parallel", reason.format(value=self.data_parallel, engine=self.engine))
        last = self.data_parallel_rank + self.data_parallel_local - 1
        if last >= self.data_parallel:
            reason = f"{last} is no rank of {self.data_parallel}, the value of data_parallel"
            raise EngineStartError("data_parallel_rank", reason)
        return self


def _kind_in(values: Mapping[str, Any]) -> EngineKind[Any] | None:
    """Return the engine that settings name; None where it is not installed, or where the name is none."""
    name = values.get("engine", DEFAULT_ENGINE)
    return find_kind(name) if isinstance(name, str) and re.fullmatch(PLUGIN_NAME, name) else None
