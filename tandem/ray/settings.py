"""Settings of Ray placement in a cluster file: its key `ray`."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from cluster.config import Config
from cluster.errors import StartError

LEAST_CPUS = 0.001
"""CPUs of a worker without resources, since Ray cannot reserve nothing."""


class RoleResources(Config):
    """Resources of each worker of a role, as Ray counts them."""

    num_cpus: NonNegativeFloat = 0.0
    """CPUs. Workers of one host pin themselves to cores, so Ray need not count them."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs, also a fraction of one."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources."""


class RaySettings(Config):
    """Settings such as {strategy: SPREAD, prefill: {num_gpus: 1}, decode: {resources: {fast_nic: 1}}}."""

    strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    """Placement strategy of Ray: workers on as many nodes as possible (SPREAD), or on few (PACK). The strict ones start
    nothing unless each worker has a node of its own (STRICT_SPREAD), or one node holds all (STRICT_PACK)."""
    wait_s: PositiveFloat = 120.0
    """Seconds to wait for resources for all workers. A Ray cluster that autoscales needs as long as that takes."""
    prefill: RoleResources = RoleResources()
    """Resources of each prefill worker."""
    decode: RoleResources = RoleResources()
    """Resources of each decode worker."""
    encoder: RoleResources = RoleResources()
    """Resources of each encode worker."""

    def check(self, autoscale: bool) -> None:
        """Check the settings.

        Raises StartError.
        """
        if autoscale and self.strategy.startswith("STRICT"):
            raise StartError(
                "ray.strategy",
                f"{self.strategy} needs a fixed number of workers and cannot be combined with --autoscale",
            )

    def options(self, module: str) -> dict[str, Any]:
        """Return the actor options of a worker that is placed by itself, by its module."""
        strategy = "SPREAD" if "SPREAD" in self.strategy else "DEFAULT"  # Ray's default packs
        return self._resources(module).model_dump() | {"scheduling_strategy": strategy}

    def bundle(self, module: str) -> dict[str, float]:
        """Return the bundle of a worker for a placement group."""
        return self.wants(module) or {"CPU": LEAST_CPUS}

    def wants(self, module: str) -> dict[str, float]:
        """Return the worker's resources, empty without any."""
        wanted = self._resources(module)
        bundle = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus, **wanted.resources}
        return {name: amount for name, amount in bundle.items() if amount}

    def _resources(self, module: str) -> RoleResources:
        return {"prefill_worker": self.prefill, "encode_worker": self.encoder}.get(module, self.decode)
