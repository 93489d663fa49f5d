"""Settings of the vllm engine."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from engine.core_types import EngineStartError
from engine.settings import CommonSettings
from engine.vllm_flags import value_of

NAME = "vllm"


class VllmSettings(CommonSettings):
    """Part of a worker's settings that only the vllm engine reads."""

    vllm_python: Path | None = None
    """Python interpreter of the environment with vLLM, Tandem and nixl, as `make vllm` sets it up. Default: this
    process's interpreter where vLLM is installed beside it, else .venv-vllm beside its environment."""
    vllm_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs by name, such as quantization, max_model_len, max_num_seqs, enforce_eager,
    kv_cache_dtype and attention_backend."""
    vllm_args: str = ""
    """Flags of `vllm serve`, as on its command line: `--max-model-len 8192 --quantization fp8`. A flag that is a
    setting here, such as --tensor-parallel-size, sets it; a flag that Tandem cannot honour is refused by name."""

    @model_validator(mode="after")
    def _have_flags_for_vllm(self) -> Self:
        if self.vllm_args and self.engine != NAME:
            raise EngineStartError("vllm_args", "flags of vLLM need engine: vllm")
        return self

    def vllm_option(self, name: str) -> Any:
        """Return the value of an argument of vLLM's that is set, None for others; a flag's as it is written."""
        return self.vllm_options.get(name, value_of(self.vllm_args, name))
