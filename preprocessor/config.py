"""Configuration of a preprocessor.

Settings of processes that run a part of a model's engine for media: preprocessors and encode workers.
"""

import os
import re
import socket
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from cluster.config import Config
from cluster.settings import DrainSettings, HealthSettings, HostSettings, LogSettings, MetricsSettings, ReachedSettings
from engine.config import WorkerConfig
from engine.model.hub import ModelPath, model_name
from engine.settings import PLUGIN_NAME, VllmFlags


class MediaSettings(VllmFlags, HostSettings, DrainSettings, HealthSettings, MetricsSettings, LogSettings, Config):
    """Settings that preprocessors and encode workers share."""

    engine: str = Field(default="vllm", pattern=PLUGIN_NAME)
    """Engine of the model's workers, whose own code reads media: vllm, or sim for tests."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of tensors, as the workers' setting of this name."""

    def worker_config(self, directory: Path) -> WorkerConfig:
        """Return the settings with which the engine opens a model's media processor, or its encoder.

        Raises StartError.
        """
        same = ("engine", "dtype", "vllm_python", "vllm_options", "vllm_args", "log_level", "log_format")
        return WorkerConfig.parse({"model": directory} | {name: getattr(self, name) for name in same})


_HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[?[0-9a-f:.]+\]?")


ModelName = Annotated[str, Field(min_length=1, max_length=256)]


class PreprocessorConfig(ReachedSettings, MediaSettings):
    """Settings of a preprocessor, which makes pictures, sounds and videos ready for models."""

    models: dict[ModelName, ModelPath] = Field(default_factory=dict)
    """Model directories, or repositories of the Hugging Face Hub as org/name[@revision], by the names that routers
    have: config, tokenizer and processor; the preprocessor neither reads nor fetches weights."""
    model: ModelPath | None = Field(default=None, validate_default=True)
    """Model directory or repository of the only model, whose name it has."""
    port: int = Field(default=50061, ge=0, le=65535)
    """gRPC port, for routers and workers; 0 lets the system choose."""

    processes: int = Field(default=3, ge=1, le=256)
    """Number of child processes of each model. Each decodes the files of one request at a time, on one core. One of
    several is always left to other tenants."""
    max_items: PositiveInt = 32
    """Most files of one request."""
    max_item_mib: int = Field(default=32, ge=1, le=64)
    """Largest file in MiB. All files of a request together have 64 MiB at most."""
    max_pixels: PositiveInt = 64_000_000
    """Most pixels of a picture, or of one frame of a video. They are checked before anything is decoded."""
    max_sound_s: PositiveInt = 600
    """Longest sound in seconds, which is checked before it is decoded."""
    item_limit_s: PositiveFloat = 20.0
    """Seconds for each file of a request. A child that takes longer is ended, and the request fails."""
    child_memory_mib: PositiveInt = 4096
    """Memory in MiB that a child may take for a request, beyond what it takes for the model's processor."""
    blob_memory_mib: PositiveInt = 2048
    """Memory in MiB for tensors. Those of running requests stay; the others stay until there is no room for them."""
    encoders: tuple[str, ...] = ()
    """Addresses of encode workers, as host:port. An item always goes to the same one, which then has its embeddings;
    the others take over the items of one that leaves the list."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts whose http and https URLs are fetched, such as `images.example.org`, or `*.example.org` for all names below
    one. They must have public addresses. Empty: no URL is fetched but `data:` URLs."""
    fetch_limit_s: ClassVar[float] = 10.0
    """Seconds for fetching one URL."""

    @field_validator("model")
    @classmethod
    def _one_way(cls, model: ModelPath | None, info: ValidationInfo) -> ModelPath | None:
        if "models" in info.data and (model is None) == (not info.data["models"]):
            raise ValueError("set either model, for one, or models, for several")
        return model

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not _HOST.fullmatch(host.lower()):
                raise ValueError(f"{host!r} is neither a host name nor *.NAME")
        return tuple(host.lower() for host in hosts)

    @property
    def paths(self) -> dict[str, Path]:
        """Models by name."""
        return self.models if self.model is None else {model_name(self.model): self.model}

    def id(self) -> str:
        return f"preprocessor-{socket.gethostname()}-{os.getpid()}"
