"""Many `sim` workers in one process: `python -m tandem.local.sim_workers --set model=DIR --set prefill=4`.

Each has its own gRPC server, its own membership and a real engine core; only computing takes no CPU time. Used for
tests of scale and failures, and for benchmarks of router and network.
"""

import asyncio
import sys
from dataclasses import dataclass
from typing import Any

from pydantic import Field, NonNegativeInt

from cluster.config import Config
from cluster.errors import StartError, TandemError
from cluster.logs import set_up
from cluster.process.life import SignalledRole, run_role
from cluster.process.tasks import Tasks, each_of
from cluster.roles import Role
from cluster.settings import LogSettings
from engine.config import WorkerConfig
from engine.model.hub import CONFIG_FILES, ModelPath, fetch_beside
from engine.process.front.local_engine import LocalEngine
from engine.process.spec import EngineSpec
from kvtransfer.local import LocalNetwork
from loans.in_process import InProcessNetwork
from worker.requests.service import serve_requests
from worker.runtime import WorkerRuntime, start_worker


@dataclass(slots=True, eq=False)
class SimWorker:
    """A worker and its engine, which tests may hang or kill."""

    worker: WorkerRuntime
    engine: LocalEngine
    leaving: asyncio.Future[None] | None = None
    """Waiter for a stop requested by a call."""


class SimPool:
    """Workers of this process, by id.

    Their pools reach only each other.
    """

    def __init__(self) -> None:
        self._network = LocalNetwork()
        self._loans: dict[bytes, InProcessNetwork] = {}
        self.workers: dict[str, SimWorker] = {}
        self._tasks = Tasks("a worker could not leave")

    async def start(self, role: Role, config: WorkerConfig) -> SimWorker:
        """Start a worker.

        Raises StartError.
        """
        engines: list[LocalEngine] = []

        def host_engine(spec: EngineSpec) -> LocalEngine:
            engines.append(LocalEngine(spec, self._network, self._loans))
            return engines[-1]

        worker = await start_worker(config, role, serve_requests, host_engine)
        self.workers[config.worker_id] = started = SimWorker(worker, engines[0])
        started.leaving = self._tasks.spawn(self._stop_when_told(config.worker_id, worker))
        return started

    async def _stop_when_told(self, worker_id: str, worker: WorkerRuntime) -> None:
        await worker.stop_requested()
        if (left := self.workers.pop(worker_id, None)) is not None:
            try:
                await left.worker.drain()
            finally:
                await left.worker.stop()

    async def stop(self, worker_id: str) -> None:
        """Stop a worker with a drain, as on SIGTERM."""
        leaves = self.workers.pop(worker_id).worker
        await leaves.drain()
        await leaves.stop()

    async def kill(self, worker_id: str) -> None:
        """Kill a worker at once, engine first."""
        gone = self.workers.pop(worker_id)
        if gone.leaving is not None:
            gone.leaving.cancel()
        gone.engine.kill()
        await gone.worker.stop()

    async def close(self) -> None:
        await each_of(self.kill(worker_id) for worker_id in list(self.workers))
        await self._tasks.close()


class SimPoolConfig(LogSettings, Config):
    """Settings of a process of sim workers."""

    model: ModelPath
    """Model directory or repository; the weights are not read."""
    prefill: NonNegativeInt = 1
    decode: NonNegativeInt = 1
    name: str = "sim"
    """Prefix of the workers' names: NAME-prefill-0 and so on."""
    routers: tuple[str, ...] = ()
    """Addresses host:port of routers to join."""
    worker: dict[str, Any] = Field(default_factory=dict)
    """Settings of every worker."""
    prefill_worker: dict[str, Any] = Field(default_factory=dict)
    """Further settings of prefill workers."""
    decode_worker: dict[str, Any] = Field(default_factory=dict)

    def workers(self) -> list[tuple[Role, WorkerConfig]]:
        """Role and settings of each worker.

        Raises StartError.
        """
        common = {"model": self.model, "routers": self.routers, "engine": "sim", **self.worker}
        roles: list[tuple[Role, int, dict[str, Any]]] = [
            ("prefill", self.prefill, self.prefill_worker),
            ("decode", self.decode, self.decode_worker),
        ]
        return [
            (role, WorkerConfig.parse(common | {"worker_id": f"{self.name}-{role}-{number}"} | settings))
            for role, count, settings in roles
            for number in range(count)
        ]


class _Process(SignalledRole):
    """The process, for `run_role`."""

    def __init__(self, pool: SimPool) -> None:
        self._pool = pool
        self.addresses = next(iter(pool.workers.values())).worker.addresses

    async def drain(self) -> None:
        """Do nothing; all workers stop at once."""

    async def stop(self) -> None:
        await self._pool.close()

    async def failed(self) -> TandemError:
        """Return the error of a worker that failed without being told to stop."""
        async with Tasks() as tasks:
            failing = {tasks.spawn(w.worker.failed()): name for name, w in self._pool.workers.items()}
            while failing:
                done, _ = await asyncio.wait(failing, return_when=asyncio.FIRST_COMPLETED)
                for worker in done:
                    if failing.pop(worker) in self._pool.workers:
                        return worker.result()
        return StartError("sim_pool", "all its workers have left")


async def start_pool(config: SimPoolConfig) -> _Process:
    """Start all workers.

    Raises StartError.
    """
    pool = SimPool()
    path = await fetch_beside(config.model, CONFIG_FILES)  # once, not for each worker
    workers = config.model_copy(update={"model": path}).workers()
    if not workers:
        raise StartError("decode", "at least one worker is needed")
    for role, worker in workers:
        await pool.start(role, worker)
    return _Process(pool)


def main() -> int:
    try:
        config = SimPoolConfig.from_command_line("tandem.local.sim_workers")
        set_up("sim", config.name, config)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run_role(lambda: start_pool(config))


if __name__ == "__main__":
    sys.exit(main())
