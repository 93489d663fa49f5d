"""The planner of a cluster of `tandem up`, in the driver's process, over its own actors."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import StartError, TandemError
from cluster.process.tasks import Tasks
from cluster.roles import Role
from cluster.settings import TlsSettings
from planner.executors import Executor, ExecutorFailed
from planner.runtime import Planner, PlannerConfig, start_planner
from protos import inference_pb2 as pb
from router.config import RouterConfig
from tandem.ray.control import Order
from tandem.ray.supervisor import Supervisor


class RayExecutor(Executor):
    """Executor of one model.

    Orders run in the background, since a worker that leaves drains first.

    Until an order is done, the next one for that role waits for the planner's next round.
    """

    switches = True

    def __init__(self, supervisor: Supervisor, model: str) -> None:
        self._supervisor = supervisor
        self._model = model
        self._tasks = Tasks()
        self._under_way: dict[Role, asyncio.Task[list[str]]] = {}

    async def sizes(self) -> Mapping[Role, int]:
        sizes = await self._supervisor.sizes(self._model)
        return {"prefill": sizes["prefill"], "decode": sizes["decode"]}

    async def scale(self, role: Role, count: int) -> None:
        """Start an order.

        Raises the failure of the previous one.
        """
        if (before := self._under_way.get(role)) is not None:
            if not before.done():
                return
            del self._under_way[role]
            if (error := before.exception()) is not None:
                raise ExecutorFailed(f"{role}={count}: {error}")
        if (await self.sizes())[role] != count:
            order = Order(0, "scale", {role: count}, self._model)
            self._under_way[role] = self._tasks.spawn(self._supervisor.perform(order))

    async def switch(self, workers: Sequence[pb.WorkerStatus], role: Role) -> None:
        try:
            await self._supervisor.switch([worker.worker_id for worker in workers], role)
        except TandemError as error:
            raise ExecutorFailed(str(error)) from None

    async def close(self) -> None:
        await self._tasks.close()


def planner_config(settings: dict[str, Any], router: RouterConfig) -> PlannerConfig:
    """Return the settings from the key `planner` of a cluster file, with the router's certificates.

    Raises StartError.
    """
    tls = {name: value for name in TlsSettings.model_fields if (value := getattr(router, name))}
    config = PlannerConfig.parse(tls | {"routers": ("127.0.0.1:1",)} | settings)
    config.check()
    if config.decode.min_workers < 1:
        reason = (
            "must be at least 1 on Ray: tandem up never ends the last decode worker, without which nothing is served"
        )
        raise StartError("planner.decode.min_workers", reason)
    return config


async def start_ray_planner(
    config: PlannerConfig, supervisor: Supervisor, joined_at: Sequence[str], models: Sequence[str]
) -> Planner:
    """Start the planner.

    Raises StartError.
    """
    if not config.model and len(models) > 1:
        raise StartError("planner.model", f"must be one of {', '.join(models)}: a planner sizes the pools of one model")
    several = config.model if len(models) > 1 else ""
    watching = config.model_copy(update={"routers": tuple(joined_at)})
    return await start_planner(watching, RayExecutor(supervisor, several))
