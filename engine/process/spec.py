"""Start parameters of engine processes, separate from the engine's code, which a front need not import."""

from dataclasses import dataclass

from cluster.roles import Role
from engine.config import WorkerConfig

LOCAL_RANK = "TANDEM_LOCAL_RANK"
"""Environment variable with a worker's number among those of its program, which see each other's GPUs. Default: 0."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Start parameters of an engine."""

    config: WorkerConfig
    role: Role
    agent_name: str
    worker_id: str = ""
    """Name of the worker, for log lines and other engines."""
    incarnation: bytes = b""
    """Incarnation of the worker's process."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Start parameters of one rank."""

    engine: EngineSpec
    rank: int

    @property
    def config(self) -> WorkerConfig:
        """Settings with this rank's share of the worker's resources."""
        return self.engine.config.of_rank(self.rank)

    @property
    def ranks(self) -> int:
        return self.engine.config.num_ranks

    @property
    def agent_name(self) -> str:
        return f"{self.engine.agent_name}-{self.rank}"
