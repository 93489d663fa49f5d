"""Errors that keep an engine from starting or running."""

from cluster.errors import StartError


class EngineStartError(StartError):
    """A setting that the engine cannot honour."""


class ModelRefused(EngineStartError):
    """A model that cannot be served correctly and is therefore refused."""

    def __init__(self, reason: str, field: str = "model") -> None:
        super().__init__(field, reason)


class KernelsUnavailable(EngineStartError):
    """Kernels of a backend that are not available on this machine, or not for this model."""

    def __init__(self, reason: str) -> None:
        super().__init__("backend", reason)


class RankLost(Exception):
    """The loss of a rank, which ends the engine."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(f"rank {rank} has ended: {how}")
        self.rank = rank
