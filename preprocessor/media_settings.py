"""Settings of processes that run a part of a model's engine for media: preprocessors and encode workers."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cluster.config import Config
from cluster.settings import HealthSettings, LogSettings, MetricsSettings
from engine.config import WorkerConfig
from engine.settings import PLUGIN_NAME


class MediaSettings(HealthSettings, MetricsSettings, LogSettings, Config):
    """Settings that preprocessors and encode workers share."""

    engine: str = Field(default="vllm", pattern=PLUGIN_NAME)
    """Engine of the model's workers, whose own code reads media: vllm, or sim for tests."""
    vllm_python: Path | None = None
    """Python interpreter of the environment with vLLM and Tandem, as the worker's setting of this name."""
    vllm_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs by name. Give those that workers have and that concern media, such as
    max_model_len, limit_mm_per_prompt and mm_processor_kwargs."""
    vllm_args: str = ""
    """The same as flags of `vllm serve`, as the workers' setting of this name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of tensors, as the workers' setting of this name."""
    host: str = "127.0.0.1"
    """Address to listen on."""

    def worker_config(self, directory: Path) -> WorkerConfig:
        """Return the settings with which the engine opens a model's media processor, or its encoder.

        Raises StartError.
        """
        same = ("engine", "dtype", "vllm_python", "vllm_options", "vllm_args", "log_level", "log_format")
        return WorkerConfig.parse({"model": directory} | {name: getattr(self, name) for name in same})
