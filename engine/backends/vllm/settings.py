"""Settings of the vllm engine."""

from typing import Any, Self

from pydantic import model_validator

from engine.errors import EngineStartError
from engine.settings import CommonSettings, VllmFlags
from engine.vllm_flags import value_of

NAME = "vllm"


class VllmSettings(VllmFlags, CommonSettings):
    """Part of a worker's settings that only the vllm engine reads."""

    @model_validator(mode="after")
    def _have_flags_for_vllm(self) -> Self:
        if self.vllm_args and self.engine != NAME:
            raise EngineStartError("vllm_args", "flags of vLLM need engine: vllm")
        return self

    def vllm_option(self, name: str) -> Any:
        """Return the value of an argument of vLLM's that is set, None for others; a flag's as it is written."""
        return self.vllm_options.get(name, value_of(self.vllm_args, name))
