"""Configuration of an encode worker."""

import os
import socket

from pydantic import Field, PositiveInt

from engine.model.hub import ModelPath
from preprocessor.config import MediaSettings


class EncoderConfig(MediaSettings):
    """Settings of an encode worker, which computes embeddings of pictures, sounds and videos for a model's workers."""

    model: ModelPath
    """Model directory, or a repository of the Hugging Face Hub as org/name[@revision]; the same as of the workers."""
    port: int = Field(default=50062, ge=0, le=65535)
    """gRPC port, for workers; 0 lets the system choose. Name it in `encoders` of the preprocessors."""
    embeddings_memory_mib: PositiveInt = 4096
    """Main memory in MiB for embeddings, of which the least recently used are dropped."""

    def id(self) -> str:
        return f"encoder-{socket.gethostname()}-{os.getpid()}"
