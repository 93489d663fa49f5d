"""What a cluster file may say about where Ray puts things: its key `ray`."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from cluster.config import Config
from cluster.errors import StartError

LEAST_CPUS = 0.001
"""Of a worker's room that is to have nothing: Ray reserves none of nothing."""


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

    strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    """Workers on as many nodes as there are, or together as far as they fit; strictly: each on another node, or all on
    one, or not at all."""
    wait_s: PositiveFloat = 120.0
    """For room for all of them. A Ray cluster that grows by itself needs as long as that takes."""
    prefill: RoleResources = RoleResources()
    decode: RoleResources = RoleResources()

    def check(self, autoscale: bool) -> None:
        """Raises StartError."""
        if autoscale and self.strategy.startswith("STRICT"):
            raise StartError("ray.strategy", f"{self.strategy} is of a fixed number of workers: not with --autoscale")

    def options(self, module: str) -> dict[str, Any]:
        """Of the actor of a worker that is placed by itself, by the module that it runs."""
        strategy = "SPREAD" if "SPREAD" in self.strategy else "DEFAULT"  # Ray's default packs
        return self._resources(module).model_dump() | {"scheduling_strategy": strategy}

    def bundle(self, module: str) -> dict[str, float]:
        """What it is to have, as a placement group says it."""
        return self.wants(module) or {"CPU": LEAST_CPUS}

    def wants(self, module: str) -> dict[str, float]:
        """The same, empty of one that is to have nothing."""
        wanted = self._resources(module)
        bundle = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus, **wanted.resources}
        return {name: amount for name, amount in bundle.items() if amount}

    def _resources(self, module: str) -> RoleResources:
        return self.prefill if module == "prefill_worker" else self.decode
