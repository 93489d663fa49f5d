"""What the chart of the `sim` example would start on Kubernetes, started for real: rendered commands, arguments,
environment and files, each pod a process with an address of its own, found through the rendered Services."""

import asyncio
import json
import os
import signal
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as Unreachable

from cluster.errors import Unauthenticated
from cluster.network.tls import ClientIdentity
from protos import inference_pb2 as pb
from router.security.api_keys import entry_for, new_key
from support.certificates import Authority
from support.chart import ROOT, needs_helm, render
from support.chart_pods import BIN, TOKEN, LoopbackPods, Pod, all_ready, started
from support.hub import Hub, Served
from support.processes import Stream, finished, until
from support.scale_api import ScaleApi
from support.sim_directories import write_sim_model
from tandem.client import Client

pytestmark = needs_helm


async def test_the_rendered_pods_serve_and_their_probes_tell_the_truth(tmp_path: Path) -> None:
    async with started(tmp_path) as node:
        (router,) = node.pods_of("demo")
        assert router.name == "demo-router-0"
        decodes = node.pods_of("demo-simulated-decode")
        assert len(decodes) == 2
        assert len(node.pods_of("demo-simulated-prefill")) == 1

        await all_ready(node)
        async with Client(f"{router.ip}:50051") as client:
            first = (await finished([Stream(client, list(range(300)), 8)]))[0]
            assert first.receipt.placement.lender.startswith("demo-simulated-prefill-")
            assert first.receipt.kv.verified_blocks > 0
            await asyncio.gather(*(drained(node, client, pod) for pod in decodes[:1]))
        await helm_test(node, tmp_path)


async def test_with_redis_two_routers_and_a_planner(tmp_path: Path) -> None:
    """They find each other in the Redis of the chart, by its password; the planner sizes the pools."""
    pools = {"demo-simulated-prefill": 1, "demo-simulated-decode": 4}
    secrets = {"a-secret": {"password": b'not "to" be \\guessed'}}
    values = {"redis.enabled": True, "redis.passwordSecret": "a-secret", "router.replicas": 2, "planner.enabled": True}
    values |= {"planner.config": {"down_after_s": 1}}
    with ScaleApi(TOKEN, **pools) as api:
        sets = [part for name, value in values.items() for part in ("--set-json", f"{name}={json.dumps(value)}")]
        async with started(tmp_path, "sim", secrets, api.url, sets) as node:
            await all_ready(node)
            (redis,) = node.pods_of("demo-redis")
            assert len(node.pods_of("demo")) == 2
            with pytest.raises(AuthenticationError):
                await Redis(host=redis.ip, socket_timeout=5).ping()
            for number, router in enumerate(node.pods_of("demo")):
                async with Client(f"{router.ip}:50051") as client:
                    (stream,) = await finished([Stream(client, list(range(number, 300)), 8)])
                    assert stream.receipt.stages[0].where == router.name
                    assert stream.receipt.kv.verified_blocks > 0

            await until(lambda: set(api.replicas.values()) == {1}, "the planner takes away what nobody needs")


async def test_redis_without_a_password_lets_other_pods_in(tmp_path: Path) -> None:
    """Protected mode, which images may have on, refuses all other pods; but not where it is bound, as here."""
    node = LoopbackPods(render(ROOT / "helm" / "examples" / "sim.yaml", "--set", "redis.enabled=true"), tmp_path, {})
    node.schedule({})
    (redis,) = node.pods_of("demo-redis")
    await node.start(redis)
    try:
        async with Redis(host=redis.ip, socket_timeout=5) as client:

            async def says() -> bool:
                try:
                    return await client.config_get("protected-mode") == {"protected-mode": "no"}
                except Unreachable:
                    return False

            await until(says, "Redis is reached, and lets everybody in")
    finally:
        await node.kill(redis)


async def test_the_doctor_lets_a_good_pod_start_and_stops_a_broken_one(tmp_path: Path) -> None:
    for setting, code, said in (("engine=sim", 0, '"broken"'), ("vllm_python=/none", 1, '"check": "vllm"')):
        folder, options = tmp_path / str(code), ["--set", "worker.doctor=true"]
        if code:
            options += [f"--set=models[0].decode.config.{each}" for each in ("engine=vllm", setting)]
            options += ["--set-json", 'models[0].source={"hostPath": {"path": "/srv"}}']
        node = LoopbackPods(render(ROOT / "helm" / "examples" / "sim.yaml", *options), folder, {})
        node.schedule({})
        (pod, *_) = node.pods_of("demo-simulated-decode")
        (doctor,) = pod.spec["initContainers"]
        place, env = node.mounts(pod), node.environment(doctor, {"metadata.name": pod.name, "status.podIP": pod.ip})
        if code:
            os.rmdir(place("/models/simulated"))
            write_sim_model(Path(place("/models/simulated")), 1000)
        process = await asyncio.create_subprocess_exec(
            *(str(BIN / doctor["command"][0]), *doctor["command"][1:]),
            *(place(part) for part in doctor["args"]),
            "--json",
            env={"PATH": os.environ["PATH"], **{name: place(value) for name, value in env.items()}},
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        found = (await process.stdout.read()).decode()
        assert await process.wait() == code, found
        assert (said in found) == bool(code), found


async def test_a_model_of_the_hub(tmp_path: Path) -> None:
    """A private one: its token comes from the secret."""
    repository = write_sim_model(tmp_path / "repository", 1000)
    sim = {"replicas": 1, "config": {"engine": "sim"}}
    source = {"hub": {"repository": "org/name", "revision": "v1", "tokenSecret": {"name": "hugging-face", "key": "t"}}}
    model = {"name": "simulated", "source": source, "prefill": sim, "decode": sim}
    with Hub({"org/name": Served({"v1": repository}, token="right")}) as hub:
        env = [{"name": "HF_ENDPOINT", "value": hub.url}]
        values = {"models": [model], "worker.env": env, "router.env": env}
        sets = [part for name, value in values.items() for part in ("--set-json", f"{name}={json.dumps(value)}")]
        async with started(tmp_path, "sim", {"hugging-face": {"t": b"right"}}, options=sets) as node:
            await all_ready(node)
            (router,) = node.pods_of("demo")
            async with Client(f"{router.ip}:50051") as client:
                (stream,) = await finished([Stream(client, list(range(300)), 8)])
            assert stream.receipt.kv.verified_blocks > 0
        assert sorted(hub.bodies()) == ["config.json"] * len(node.pods), "each pod has a cache of its own"


async def test_with_certificates_and_keys(tmp_path: Path) -> None:
    """Probes need neither; nobody else gets anywhere without."""
    members, public = Authority(tmp_path, "members"), Authority(tmp_path, "public")
    key = new_key()
    secrets = {
        "tandem-member": secret_of(members, "member", "tandem.internal"),
        "tandem-public": secret_of(public, "door", "127.0.1.3"),
        "tandem-keys": {"keys.yaml": entry_for(key, "test", "", [], None).encode()},
        "tandem-test-key": {"key": key.encode()},
    }
    async with started(tmp_path, "tls", secrets) as node:
        (router,) = node.pods_of("demo")
        assert router.ip == "127.0.1.3"
        await all_ready(node)
        address, door = f"{router.ip}:50051", ClientIdentity(public.path)
        async with Client(address, api_key=key, tls=door) as client:
            served = (await finished([Stream(client, list(range(300)), 8)]))[0]
            assert served.receipt.kv.verified_blocks > 0
        async with Client(address, tls=door) as client:
            with pytest.raises(Unauthenticated):
                await finished([Stream(client, [1, 2, 3], 2)])
        for pod in node.pods:
            for port in pod.container["ports"]:
                if port["name"] in ("grpc", "internal"):
                    assert not await in_the_clear(f"{pod.ip}:{port['containerPort']}"), (pod.name, port)
        await helm_test(node, tmp_path)


def secret_of(authority: Authority, name: str, host: str) -> dict[str, bytes]:
    issued = authority.issue(name, (host,))
    files = {"tls.crt": issued.cert, "tls.key": issued.key, "ca.crt": authority.path}
    return {name: path.read_bytes() for name, path in files.items()}


async def in_the_clear(address: str) -> bool:
    """Whether anything is answered there without TLS. Somebody listens."""
    host, _, port = address.rpartition(":")
    _, connected = await asyncio.open_connection(host, int(port))
    connected.close()
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
    return True


async def drained(node: LoopbackPods, client: Client, leaving: Pod) -> None:
    """As a rolling update does it: told to stop, alive until its streams are over, ready no more."""
    streams = [Stream(client, [number, number + 1], 400) for number in range(6)]
    await asyncio.gather(*(stream.reached(3) for stream in streams))
    leaving.process.send_signal(signal.SIGTERM)

    async def unready() -> bool:
        return not await node.probe(leaving, "readiness")

    await until(unready, "it is ready no more")
    if leaving.process.returncode is None:
        assert await node.probe(leaving, "liveness")
    late = Stream(client, [9, 9], 4)
    await finished([*streams, late])
    assert all(len(stream.token_ids) == 400 for stream in streams)
    assert late.receipt.placement.decode_worker != leaving.name
    assert isinstance(late.finish, pb.Finish)
    assert await asyncio.wait_for(leaving.process.wait(), 30) == 0


async def helm_test(node: LoopbackPods, folder: Path) -> None:
    """What `helm test` would run."""
    (manifest,) = [m for m in node.manifests if m["kind"] == "Pod"]
    (container,) = manifest["spec"]["containers"]
    (router,) = node.pods_of("demo")
    command = [part.replace("demo:", f"{router.ip}:") for part in [*container["command"], *container["args"]]]
    env = node.environment(container, {})
    for volume in manifest["spec"]["volumes"]:
        for item in volume.get("secret", {}).get("items", []):
            (folder / item["path"]).write_bytes(node.secrets[volume["secret"]["secretName"]][item["key"]])
            env = {name: value.replace("/etc/tandem-tls", str(folder)) for name, value in env.items()}
    process = await asyncio.create_subprocess_exec(
        *(str(BIN / command[0]), *command[1:]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | env,
    )
    said = (await process.stdout.read()).decode()
    assert await process.wait() == 0, said
    assert "1 finished" in said
