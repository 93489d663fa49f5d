"""What health says to supervisors: alive, and ready, which are not the same."""

import os
import signal
from pathlib import Path
from typing import Any

from cluster.network.rpc import LIVENESS, READINESS
from engine.config import WorkerConfig
from planner.runtime import PlannerConfig
from support.ports import free_port
from support.processes import Stream, engine_of, finished, pause, role, says, until
from tandem.client import Client


async def until_ready(address: str, ready: bool) -> None:
    async def there() -> bool:
        return await says(address, READINESS) is ready

    await until(there, f"{address} is {'' if ready else 'not '}ready")


async def test_a_worker_that_no_router_knows_is_alive_and_not_ready(model: Path) -> None:
    config = WorkerConfig(model=model, engine="sim", routers=("127.0.0.1:1",), worker_id="alone")
    async with role("decode_worker", "alone", config) as worker:
        assert await says(worker.address, LIVENESS)
        assert await says(worker.address, "")
        assert not await says(worker.address, READINESS)


async def test_ready_is_who_can_serve(model: Path, cluster_of: Any) -> None:
    cluster = cluster_of(model, prefill=0, decode=1, engine="sim", sim_step_ms=20.0, drain_s=30.0)
    async with cluster, Client(cluster.address) as client:
        (worker,) = cluster.workers
        await until_ready(worker.address, True)
        await until_ready(cluster.address, True)
        stream = Stream(client, [1, 2, 3], 100)
        await stream.reached(2)
        os.kill(worker.pid, signal.SIGTERM)
        await until_ready(worker.address, False)
        assert await says(worker.address, LIVENESS), "it drains"
        assert not await says(worker.address, "")
        await until_ready(cluster.address, False)  # its only decode worker takes nothing more
        assert await says(cluster.address, LIVENESS)
        await finished([stream])


async def test_who_is_busy_is_alive_and_ready(model: Path, cluster_of: Any) -> None:
    """More streams than it can run at once, steps as short as they can be."""
    settings = {"engine": "sim", "sim_step_ms": 0.0, "kv_memory_mib": 1, "reserve_output_tokens": 400}
    async with cluster_of(model, prefill=0, decode=1, **settings) as cluster, Client(cluster.address) as client:
        addresses = [cluster.address, cluster.decode[0].address]
        for address in addresses:
            await until_ready(address, True)
        streams = [Stream(client, [1, 2, number], 150, timeout_s=None) for number in range(100)]
        await streams[0].reached(1)
        probes = 0
        while not all(stream.task.done() for stream in streams):
            for address in addresses:
                assert await says(address, LIVENESS)
                assert await says(address, READINESS)
            probes += 1
        await finished(streams)
        assert probes, "they were probed while streams ran"


async def test_who_is_cut_off_is_alive_and_not_ready(model: Path, cluster_of: Any) -> None:
    """A worker and a planner whose only router dies."""
    async with cluster_of(model, prefill=0, decode=1, engine="sim") as cluster:
        port = free_port()
        routers = (cluster.router.joined_at,)
        config = PlannerConfig(routers=routers, host="127.0.0.1", down_after_s=1.0, metrics_port=0, health_port=port)
        async with role("planner", "planner", config):
            both = cluster.decode[0].address, f"127.0.0.1:{port}"
            for address in both:
                await until_ready(address, True)
            cluster.router.process.kill()
            for address in both:
                await until_ready(address, False)
                assert await says(address, LIVENESS)


async def test_an_engine_that_hangs_is_not_ready(model: Path, cluster_of: Any) -> None:
    async with cluster_of(model, prefill=0, decode=1, engine="sim") as cluster:
        (worker,) = cluster.workers
        await until_ready(worker.address, True)
        engine = engine_of(worker)
        await pause(engine)
        await until_ready(worker.address, False)
        assert await says(worker.address, LIVENESS)
        os.kill(engine, signal.SIGCONT)
        await until_ready(worker.address, True)


async def test_a_router_without_workers_is_alive_and_not_ready(model: Path, cluster_of: Any) -> None:
    async with cluster_of(model, prefill=0, decode=1, engine="sim") as cluster:
        (worker,) = cluster.workers
        await until_ready(cluster.address, True)
        worker.process.kill()
        await until_ready(cluster.address, False)
        assert await says(cluster.address, LIVENESS)
