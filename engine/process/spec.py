"""What an engine is told when it is started. Apart from what an engine is made of, which its front need not import."""

from dataclasses import dataclass
from pathlib import Path

from cluster.roles import Role
from engine.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """All an engine must be told."""

    config: WorkerConfig
    role: Role
    agent_name: str
    worker_id: str = ""
    """For log lines: whose engine it is."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """All that one of several ranks of an engine must be told."""

    engine: EngineSpec
    rank: int
    meeting: Path
    """Where the ranks find each other, see `engine/backends/torch/ranks.py`."""

    @property
    def config(self) -> WorkerConfig:
        """With this rank's share."""
        return self.engine.config.of_rank(self.rank)

    @property
    def ranks(self) -> int:
        return self.engine.config.tensor_parallel

    @property
    def agent_name(self) -> str:
        return f"{self.engine.agent_name}-{self.rank}"
