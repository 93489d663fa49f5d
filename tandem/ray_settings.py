"""What a cluster file may say about where Ray puts things: its key `ray`."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat

from cluster.config import Config


class RaySettings(Config):
    """ray: {strategy: SPREAD, prefill: {num_gpus: 1}, decode: {num_gpus: 0.5, resources: {fast_nic: 1}}}"""

    strategy: Literal["SPREAD", "PACK"] = "SPREAD"
    """Workers on as many nodes as there are, or together as far as they fit."""
    prefill: "RoleResources" = Field(default_factory=lambda: RoleResources())
    decode: "RoleResources" = Field(default_factory=lambda: RoleResources())

    def of(self, module: str) -> "RoleResources":
        """Of a worker, by the module that it runs."""
        return self.prefill if module == "prefill_worker" else self.decode


class RoleResources(Config):
    """Of each worker of a role, as Ray counts them."""

    num_cpus: NonNegativeFloat = 0.0
    """Workers pin themselves to cores where they all are on one host: Ray need not count."""
    num_gpus: NonNegativeFloat = 0.0
    """Also a part of one."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom ones."""

    def options(self) -> dict[str, Any]:
        """Of an actor."""
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "resources": dict(self.resources)}


RaySettings.model_rebuild()
