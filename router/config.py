"""Configuration of the router."""

import os
import socket
from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt

from cluster.config import Config


class RouterConfig(Config):
    """The global router."""

    model: Path
    """The model directory: config and tokenizer; the weights are not read."""
    router_id: str = ""
    """Unique among the routers. Default: host and process id."""
    host: str = "127.0.0.1"
    port: int = Field(default=50051, ge=0, le=65535)
    """0 lets the system choose."""

    max_queued: PositiveInt = 4096
    """Requests that may wait for a pair; more are refused at once."""
    default_deadline_s: PositiveFloat = 600.0
    """For requests that bring none."""
    no_worker_grace_s: PositiveFloat = 10.0
    """How long a request may wait while no decode worker at all is there."""
    max_attempts: PositiveInt = 4
    """Placements of one request, the first one included."""
    worker_silence_s: PositiveFloat = 10.0
    """A worker whose engine reports nothing for so long is lost; its requests are placed anew."""
    grammar_limit_s: PositiveFloat = 2.0
    """How long the grammar of a structured output may take to compile. The decode worker compiles it again, once, and
    its streams wait as long."""

    prefill_tokens_per_s: PositiveFloat = 4000.0
    """What placement assumes of a prefill worker."""
    decode_prefill_tokens_per_s: PositiveFloat = 1000.0
    """And of a decode worker, whose prompts are computed in small chunks between decode steps."""
    kv_bytes_per_s: PositiveFloat = 1e9
    """Bandwidth assumed between any two workers."""
    loan_overhead_s: PositiveFloat = 0.003
    """Fixed cost of a loan: handshake and the last read."""

    def id(self) -> str:
        return self.router_id or f"router-{socket.gethostname()}-{os.getpid()}"
