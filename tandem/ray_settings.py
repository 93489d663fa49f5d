"""What a cluster file may say about where Ray puts things: its key `ray`."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat

from cluster.config import Config


class RoleResources(Config):
    """Of each worker of a role, as Ray counts them."""

    num_cpus: NonNegativeFloat = 0.0
    """Workers pin themselves to cores where they all are on one host: Ray need not count."""
    num_gpus: NonNegativeFloat = 0.0
    """Also a part of one."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom ones."""


class RaySettings(Config):
    """ray: {strategy: SPREAD, prefill: {num_gpus: 1}, decode: {num_gpus: 0.5, resources: {fast_nic: 1}}}"""

    strategy: Literal["SPREAD", "PACK"] = "SPREAD"
    """Workers on as many nodes as there are, or together as far as they fit."""
    prefill: RoleResources = RoleResources()
    decode: RoleResources = RoleResources()

    def options(self, module: str) -> dict[str, Any]:
        """Of the actor of a worker, by the module that it runs."""
        resources = self.prefill if module == "prefill_worker" else self.decode
        strategy = "SPREAD" if self.strategy == "SPREAD" else "DEFAULT"  # Ray's default packs
        return resources.model_dump() | {"scheduling_strategy": strategy}
