"""A vLLM worker over two Ray nodes: both of its programs are placed, one serves, and both start again after a loss."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.errors import ServiceError
from support.processes import Stream, finished, until
from support.vllm_engines import OPTIONS, PYTHON, need_vllm
from tandem.client import Client
from tandem.storyteller import STORYTELLER

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
OBJECT_STORE = 80 << 20
START_S = 240.0
pytestmark = [need_vllm, pytest.mark.long, pytest.mark.timeout(0)]


@pytest.fixture
def ray_nodes() -> Iterator[Any]:
    """A head, and two nodes with room for one program each."""
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED")}
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    of_head = {"num_cpus": 1, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=of_head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, resources={"half": 1}, object_store_memory=OBJECT_STORE)
        yield cluster
    finally:
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.yaml"
    worker = {"engine": "vllm", "vllm_python": str(PYTHON), "tensor_parallel": 2, "nodes": 2, "dtype": "float32"}
    settings = {
        "models": [{"path": str(STORYTELLER), "prefill": 0, "decode": 1}],
        "worker": worker | {"kv_memory_mib": 64, "vllm_options": OPTIONS, "max_prefill_tokens": 64},
        "ray": {"decode": {"resources": {"half": 1}}, "strategy": "STRICT_SPREAD"},
    }
    file.write_text(yaml.safe_dump(settings))
    return file


@asynccontextmanager
async def cluster_up(config: Path, port: int, address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = os.environ | {"RAY_ADDRESS": address, "PYTHONUNBUFFERED": "1", "COLUMNS": "500"}
    command = (str(BIN / "tandem"), "up", "--config", str(config), "--port", str(port), "--no-http")
    up = await asyncio.create_subprocess_exec(*command, env=environment, cwd=ROOT)
    try:
        yield up
    finally:
        if up.returncode is None:
            up.send_signal(signal.SIGINT)
        await up.wait()


def engines() -> list[int]:
    """Engine processes of vLLM on this machine: one of each program."""
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if runs_vllm(folder)]


def runs_vllm(folder: Path) -> bool:
    try:
        return b"engine.process.vllm_" in (folder / "cmdline").read_bytes()
    except OSError:  # it has ended
        return False


async def test_it_serves_and_serves_again_after_either_program_is_lost(
    ray_nodes: Any, config: Path, free_port: int
) -> None:
    async with cluster_up(config, free_port, ray_nodes.address), Client(f"127.0.0.1:{free_port}") as client:

        async def serves() -> bool:
            try:
                (model,) = await client.list_models()
            except ServiceError:
                return False
            return model.decode_workers == 1

        await until(serves, "the worker serves", START_S)
        programs = engines()
        assert len(programs) == 2
        (answer,) = await finished([Stream(client, range(3, 90), 24)])
        for number in range(2):
            killed = sorted(engines())[number]
            os.kill(killed, signal.SIGKILL)

            async def started_again(lost: int = killed) -> bool:
                pids = engines()
                return len(pids) == 2 and lost not in pids and await serves()

            await until(started_again, "both programs run again", START_S)
            (again,) = await finished([Stream(client, range(3, 90), 24, timeout_s=50)])
            assert again.token_ids == answer.token_ids
