"""Why an engine cannot start."""

from cluster.errors import StartError


class EngineStartError(StartError):
    """A setting of the engine cannot be honoured."""


class ModelRefused(EngineStartError):
    """The model cannot be served correctly, so it is not served."""

    def __init__(self, reason: str) -> None:
        super().__init__("model", reason)


class KernelsUnavailable(EngineStartError):
    """The kernels of a backend cannot be had on this machine, or not for this model."""

    def __init__(self, reason: str) -> None:
        super().__init__("backend", reason)


class RankLost(Exception):
    """One of the engine's tensor-parallel ranks is gone, so the engine is."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(f"rank {rank} is gone: {how}")
        self.rank = rank
