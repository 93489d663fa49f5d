"""What an engine is told when it is started. Apart from what an engine is made of, which its front need not import."""

from dataclasses import dataclass

from cluster.roles import Role
from engine.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """All an engine must be told."""

    config: WorkerConfig
    role: Role
    agent_name: str
