"""A Ray cluster of several nodes: a router and a node that die under load, workers added and taken away, restarted in
turn."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.errors import Unavailable
from support.processes import Stream, finished, until
from tandem.client import Client

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
OBJECT_STORE = 80 << 20


@pytest.fixture
def ray_nodes() -> Iterator[Any]:
    """A head and two nodes, each with room for decode workers that the other has not."""
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED")}
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    head = {"num_cpus": 2, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield cluster
    finally:
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Path:
    """Of sim workers, each of which wants what the two nodes have and the head has not."""
    file = tmp_path / "cluster.yaml"
    settings = {
        "models": [{"path": str(model), "prefill": 1, "decode": 2}],
        "worker": {"engine": "sim", "sim_step_ms": 5.0, "kv_memory_mib": 16},
        "ray": {"decode": {"resources": {"decoding": 1}}, "prefill": {"num_gpus": 0.5}},
    }
    file.write_text(yaml.safe_dump(settings))
    return file


Groups = list[tuple[str, str, dict[str, dict[str, float]]]]


def groups(address: str, script: str = "") -> Groups:
    """Of those that are there, once `script` has run: strategy, state, and what each bundle has."""
    command = [sys.executable, "-c", JOIN + script + GROUPS, address]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    said: Groups = [tuple(entry) for entry in json.loads(answer.stdout.splitlines()[-1])]
    return said


JOIN = """
import asyncio, json, sys, ray
ray.init(sys.argv[1], log_to_driver=False)
"""
LEAVES_NOTHING = """
from tandem.ray.placement_group import WorkerGroup
from tandem.ray.settings import RaySettings
settings = RaySettings.parse({"prefill": {"num_gpus": 1.5}, "decode": {"num_gpus": 0.5}})
group = WorkerGroup(settings, [])
assert asyncio.run(group.spare("prefill_worker")) is None
room = asyncio.run(group.spare("decode_worker"))
assert room["num_gpus"] == 0.5
group.give_back(room)
of_one = WorkerGroup(settings, ["decode_worker"])
asyncio.run(of_one.reserve(print))
of_one.give_back(of_one.take("decode_worker"))
"""
GROUPS = """
there = ray.util.placement_group_table().values()
print(json.dumps([(g["strategy"], g["state"], g["bundles"]) for g in there if g["state"] != "REMOVED"]))
"""


def without_room_nobody_starts(config: Path, port: int, address: str) -> None:
    """Three workers, each of which is to have a node of its own."""
    settings = yaml.safe_load(config.read_text())
    settings["ray"] |= {"strategy": "STRICT_SPREAD", "wait_s": 1.0}
    file = config.with_name("larger.yaml")
    file.write_text(yaml.safe_dump(settings))
    up = tandem("up", "--config", str(file), "--port", str(port), "--no-http", address=address)
    assert up.returncode == 2
    said = " ".join(up.stderr.split())
    wanted = "2 x (decoding 1), 1 x (GPU 0.5), STRICT_SPREAD (each on a node of its own)"
    assert f"ray: no room within 1 s for {wanted}; the nodes have, used or not, " in said
    assert "2 x (CPU 1, GPU 1, decoding 2)" in said
    assert groups(address) == []


def tandem(*arguments: str, address: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"RAY_ADDRESS": address, "PYTHONUNBUFFERED": "1"}
    command = [str(BIN / "tandem"), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def listener(port: int) -> int:
    """Id of the process that listens there."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it is closed by now
            if os.readlink(file) in sockets:
                return int(file.parts[2])
    raise AssertionError(f"nobody listens at port {port}")


async def worker_names(client: Client) -> list[str]:
    (model,) = (await client.cluster_status()).models
    return [worker.worker_id for worker in model.workers if not worker.draining]


async def test_nodes_die_and_workers_come_and_go_and_no_request_is_lost(
    ray_nodes: Any, config: Path, free_port: int
) -> None:
    of_node = {"num_cpus": 1, "num_gpus": 1, "resources": {"decoding": 2}, "object_store_memory": OBJECT_STORE}
    nodes = [ray_nodes.add_node(**of_node) for _ in range(2)]
    await asyncio.to_thread(without_room_nobody_starts, config, free_port, ray_nodes.address)
    environment = os.environ | {"RAY_ADDRESS": ray_nodes.address, "PYTHONUNBUFFERED": "1", "COLUMNS": "500"}
    up = await asyncio.create_subprocess_exec(
        *(str(BIN / "tandem"), "up", "--config", str(config), "--port", str(free_port), "--no-http", "--routers", "2"),
        env=environment,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert up.stdout is not None
    told: list[str] = []

    async def listen() -> None:
        while line := await up.stdout.readline():
            told.append(line.decode())

    listening = asyncio.ensure_future(listen())
    try:
        first, second = f"127.0.0.1:{free_port}", f"127.0.0.1:{free_port + 1}"
        async with Client(first, second) as client, Client(second, first) as of_second, Client(first) as of_first:
            await until(lambda: any("serving at" in line for line in told), "the cluster serves", 300)
            assert await worker_names(client) == ["decode-0", "decode-1", "prefill-0"]
            ((strategy, _, bundles),) = await asyncio.to_thread(groups, ray_nodes.address)
            assert strategy == "SPREAD"
            wanted = [{"GPU": 0.5}, {"decoding": 1.0}, {"decoding": 1.0}]
            assert sorted(bundles.values(), key=lambda bundle: sorted(bundle.items())) == wanted
            reference = await finished([Stream(client, range(n, n + 40), 400) for n in range(4)])

            streams = [Stream(of_second, range(n, n + 40), 400) for n in range(4)]
            await asyncio.gather(*(stream.reached(5) for stream in streams))
            os.kill(killed := listener(free_port), signal.SIGKILL)
            streams += [Stream(client, range(n, n + 40), 400) for n in range(4)]
            await finished(streams)
            for stream, undisturbed in zip(streams, reference + reference, strict=True):
                assert stream.token_ids == undisturbed.token_ids

            async def router_again() -> bool:
                try:
                    return await worker_names(of_first) == ["decode-0", "decode-1", "prefill-0"]
                except Unavailable:
                    return False

            await until(router_again, "the router runs again where it was")
            assert listener(free_port) != killed
            assert any("router-0: " in line and "starting it again in 0.5 s" in line for line in told)
            await finished([Stream(of_first, range(40), 40)])

            streams = [Stream(client, range(n, n + 40), 400) for n in range(4)]
            await asyncio.gather(*(stream.reached(5) for stream in streams))
            await asyncio.to_thread(ray_nodes.remove_node, nodes[0], allow_graceful=False)
            await finished(streams)
            for stream, undisturbed in zip(streams, reference, strict=True):
                assert stream.token_ids == undisturbed.token_ids
            assert any(stream.receipt.placement.attempt > 1 for stream in streams)

            async def again() -> bool:
                return await worker_names(client) == ["decode-0", "decode-1", "prefill-0"]

            await until(again, "the worker that died runs on the other node")
            assert any("decode-" in line and "starting it again in 0.5 s" in line for line in told)

            ray_nodes.add_node(**of_node)
            streams = [Stream(client, range(n, n + 40), 400) for n in range(4)]
            scaled = await asyncio.to_thread(tandem, "scale", "decode=3", "prefill=2", address=ray_nodes.address)
            assert scaled.returncode == 0, scaled.stderr
            for name in ("decode-2", "prefill-1"):
                assert f"{name}: started in " in scaled.stdout
            assert await worker_names(client) == ["decode-0", "decode-1", "decode-2", "prefill-0", "prefill-1"]
            scaled = await asyncio.to_thread(tandem, "scale", "decode=1", address=ray_nodes.address)
            assert scaled.returncode == 0, scaled.stderr
            await finished(streams)
            for stream, undisturbed in zip(streams, reference, strict=True):
                assert stream.token_ids == undisturbed.token_ids
            assert await worker_names(client) == ["decode-0", "prefill-0", "prefill-1"]

            to_decode = "prefill-1", "--to", "decode", "--address", f"127.0.0.1:{free_port}"
            switched = await asyncio.to_thread(tandem, "switch", *to_decode, address=ray_nodes.address)
            assert "prefill-1 is a decode worker now" in switched.stdout, switched.stderr
            scaled = await asyncio.to_thread(tandem, "scale", "decode=1", address=ray_nodes.address)
            assert scaled.returncode == 0, scaled.stderr
            assert await worker_names(client) == ["decode-0", "prefill-0"]

            streams = [Stream(client, range(n, n + 40), 400) for n in range(4)]
            restarted = await asyncio.to_thread(tandem, "restart", address=ray_nodes.address)
            assert restarted.returncode == 0, restarted.stderr
            await finished(streams)
            for stream, undisturbed in zip(streams, reference, strict=True):
                assert stream.token_ids == undisturbed.token_ids
            assert await worker_names(client) == ["decode-1", "prefill-1"]
            own, of_all = await asyncio.to_thread(groups, ray_nodes.address, LEAVES_NOTHING)
            assert sorted(map(len, (own[2], of_all[2]))) == [1, 3], "the only prefill worker has followed beside it"

            wrong = await asyncio.to_thread(tandem, "scale", "decode=0", address=ray_nodes.address)
            assert wrong.returncode == 1
            assert "nothing would be served" in wrong.stderr
            nobody = await asyncio.to_thread(tandem, "scale", "decode=2", "--name", "x", address=ray_nodes.address)
            assert "no cluster named 'x'" in nobody.stderr
        ended = await asyncio.to_thread(tandem, "down", address=ray_nodes.address)
        assert ended.returncode == 0, ended.stderr
        assert await up.wait() == 0
        await listening
        assert told[-1] == "tandem: stopped\n"
    finally:
        listening.cancel()
        if up.returncode is None:
            up.kill()
            await up.wait()
        sys.stderr.write("".join(told))
