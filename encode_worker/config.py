"""Configuration of an encode worker."""

import os
import socket
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from cluster.config import Config
from cluster.settings import HealthSettings, LogSettings, MetricsSettings
from engine.config import WorkerConfig
from engine.model.hub import ModelPath
from engine.settings import PLUGIN_NAME


class EncoderConfig(HealthSettings, MetricsSettings, LogSettings, Config):
    """Settings of an encode worker, which computes embeddings of pictures, sounds and videos for a model's workers."""

    model: ModelPath
    """Model directory, or a repository of the Hugging Face Hub as org/name[@revision]; the same as of the workers."""
    engine: str = Field(default="vllm", pattern=PLUGIN_NAME)
    """Engine of the model's workers, whose encoder is loaded without the language model."""
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
    port: int = Field(default=50062, ge=0, le=65535)
    """gRPC port, for workers; 0 lets the system choose. Name it in `encoders` of the preprocessors."""
    drain_s: NonNegativeFloat = 10.0
    """Seconds in which a stopping encode worker ends what it computes."""
    embeddings_memory_mib: PositiveInt = 4096
    """Main memory in MiB for embeddings, of which the least recently used are dropped."""

    def id(self) -> str:
        return f"encoder-{socket.gethostname()}-{os.getpid()}"

    def worker_config(self, directory: Path) -> WorkerConfig:
        """Return the settings with which the engine loads the encoder.

        Raises StartError.
        """
        same = ("engine", "dtype", "vllm_python", "vllm_options", "vllm_args", "log_level", "log_format")
        return WorkerConfig.parse({"model": directory} | {name: getattr(self, name) for name in same})
