"""`tandem up --autoscale`: a pool grows while requests wait for room, and shrinks when they are gone."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import yaml

from cluster.errors import Unavailable
from support.processes import Stream, until
from tandem.client import Client

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
QUICK = {"down_after_s": 2.0, "start_s": 5.0}


async def decode_workers(client: Client) -> int:
    (model,) = (await client.cluster_status()).models
    return sum(worker.role == "decode" and worker.has_reported and not worker.draining for worker in model.workers)


async def test_a_cluster_on_ray_sizes_itself(model: Path, tmp_path: Path, free_port: int) -> None:
    file = tmp_path / "cluster.yaml"
    settings = {
        "models": [{"path": str(model), "prefill": 1, "decode": 1}],
        "worker": {"engine": "sim", "sim_step_ms": 5.0, "kv_memory_mib": 1, "reserve_output_tokens": 5000},
        "planner": QUICK | {"prefill": {"max_workers": 1}, "decode": {"max_workers": 2}},
    }
    file.write_text(yaml.safe_dump(settings))
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
    options = ("--autoscale", "--config", str(file), "--port", str(free_port), "--no-http")
    up = await asyncio.create_subprocess_exec(str(BIN / "tandem"), "up", *options, env=environment, cwd=ROOT)
    try:
        async with Client(f"127.0.0.1:{free_port}") as client:

            async def there() -> bool:
                try:
                    return await decode_workers(client) == 1
                except Unavailable:
                    return False

            await until(there, "the cluster serves", 300)
            streams = [Stream(client, range(n, n + 40), 5000) for n in range(3)]

            async def grown() -> bool:
                return await decode_workers(client) == 2

            await until(grown, "a second decode worker serves")
            await asyncio.gather(*(stream.cancel() for stream in streams))

            async def shrunk() -> bool:
                return await decode_workers(client) == 1

            await until(shrunk, "it is gone again")
        up.send_signal(signal.SIGINT)
        assert await up.wait() == 0
    finally:
        if up.returncode is None:
            up.kill()
            await up.wait()
