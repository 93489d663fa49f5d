"""Settings of the torch engine."""

from typing import Literal

from engine.settings import CommonSettings


class TorchSettings(CommonSettings):
    """Part of a worker's settings that only the torch engine reads."""

    backend: Literal["auto", "native", "sdpa"] = "auto"
    """Kernels of the torch engine. native: compiled once for this machine's CPU. sdpa: torch's own, several times
    slower. auto: native where a C++ compiler is found; sdpa with a warning where it is not, or where the native kernels
    do not know the dtype."""
