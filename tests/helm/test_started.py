"""What the chart of the `sim` example would start on Kubernetes, started for real: rendered commands, arguments,
environment and files, each pod a process with an address of its own, found through the rendered Services."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2 as pb
from support.chart import ROOT, needs_helm, render
from support.processes import Stream, finished, until
from tandem.client import Client

pytestmark = needs_helm
BIN = Path(sys.executable).parent
SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass(slots=True)
class Pod:
    name: str
    ip: str
    labels: dict[str, str]
    spec: dict[str, Any]
    process: asyncio.subprocess.Process | None = None

    @property
    def container(self) -> dict[str, Any]:
        container: dict[str, Any] = self.spec["containers"][0]
        return container


@dataclass(slots=True)
class Node:
    """Stands for kubelet and DNS: what of them a pod sees."""

    manifests: list[dict[str, Any]]
    folder: Path
    pods: list[Pod] = field(default_factory=list)

    def schedule(self) -> None:
        for manifest in self.manifests:
            if manifest["kind"] in ("Deployment", "StatefulSet"):
                template = manifest["spec"]["template"]
                for number in range(manifest["spec"]["replicas"]):
                    name = f"{manifest['metadata']['name']}-{number}"
                    ip = f"127.0.1.{len(self.pods) + 1}"
                    self.pods.append(Pod(name, ip, template["metadata"]["labels"], template["spec"]))

    def pods_of(self, service: str) -> list[Pod]:
        """That its selector chooses."""
        (found,) = [m for m in self.manifests if m["kind"] == "Service" and m["metadata"]["name"] == service]
        selector = found["spec"]["selector"].items()
        return [pod for pod in self.pods if selector <= pod.labels.items()]

    def resolve(self, text: str) -> str:
        """Names of pods behind headless Services, as DNS has them; and a pod listens on its own address only."""

        def address(match: re.Match[str]) -> str:
            (pod,) = [pod for pod in self.pods_of(match[2]) if pod.name == match[1]]
            return pod.ip

        return re.sub(r"\b(demo-router-\d+)\.(demo-routers)\b", address, text)

    def mounts(self, pod: Pod) -> Callable[[str], str]:
        """Writes the pod's ConfigMaps; paths in the container to paths here."""
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        places: dict[str, str] = {}
        for mount in pod.container["volumeMounts"]:
            place = self.folder / pod.name / mount["name"]
            place.mkdir(parents=True, exist_ok=True)
            places[mount["mountPath"]] = str(place)
        for mount in pod.container["volumeMounts"]:
            if (config := volumes[mount["name"]].get("configMap")) is not None:
                data = next(
                    m["data"]
                    for m in self.manifests
                    if (m["kind"], m["metadata"]["name"]) == ("ConfigMap", config["name"])
                )
                for name, text in data.items():
                    text = self.resolve(text).replace("0.0.0.0", pod.ip)
                    (Path(places[mount["mountPath"]]) / name).write_text(_replaced(text, places))
        return lambda text: _replaced(text, places)

    async def start(self, pod: Pod) -> None:
        container, place = pod.container, self.mounts(pod)
        fields = {"metadata.name": pod.name, "status.podIP": pod.ip}
        env = {
            entry["name"]: entry["value"] if "value" in entry else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            for entry in container["env"]
        }
        command = [*container["command"], *container.get("args", [])]
        command = [re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], part) for part in command]
        command = [self.resolve(place(part)) for part in command]
        command[0] = str(BIN / command[0])
        env = {name: place(value) for name, value in env.items()}
        pod.process = await asyncio.create_subprocess_exec(
            *command, env={"PATH": os.environ["PATH"], **env}, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL
        )

    async def probe(self, pod: Pod, kind: str) -> bool:
        asked = pod.container[f"{kind}Probe"]["grpc"]
        async with grpc.aio.insecure_channel(f"{pod.ip}:{asked['port']}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=asked.get("service", "")), timeout=2)
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == SERVING)


def _replaced(text: str, places: dict[str, str]) -> str:
    inside = sorted(places, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, inside)), lambda match: places[match[0]], text)


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[Node]:
    node = Node(render(ROOT / "helm" / "examples" / "sim.yaml"), folder)
    node.schedule()
    try:
        for pod in node.pods:
            await node.start(pod)
        yield node
    finally:
        for pod in node.pods:
            if pod.process is not None and pod.process.returncode is None:
                pod.process.kill()
                await pod.process.wait()


async def test_the_rendered_pods_serve_and_their_probes_tell_the_truth(tmp_path: Path) -> None:
    async with started(tmp_path) as node:
        (router,) = node.pods_of("demo")
        assert router.name == "demo-router-0"
        decodes = node.pods_of("demo-simulated-decode")
        assert len(decodes) == 2
        assert len(node.pods_of("demo-simulated-prefill")) == 1

        async def all_ready() -> bool:
            kinds = ("startup", "readiness", "liveness")
            return all([await node.probe(pod, kind) for pod in node.pods for kind in kinds])

        await until(all_ready, "every probe of every pod succeeds", 60)
        async with Client(f"{router.ip}:50051") as client:
            first = (await finished([Stream(client, list(range(300)), 8)]))[0]
            assert first.receipt.placement.lender.startswith("demo-simulated-prefill-")
            assert first.receipt.kv.verified_blocks > 0
            await asyncio.gather(*(drained(node, client, pod) for pod in decodes[:1]))
        await helm_test(node)


async def drained(node: Node, client: Client, leaving: Pod) -> None:
    """As a rolling update does it: told to stop, alive until its streams are over, ready no more."""
    streams = [Stream(client, [number, number + 1], 400) for number in range(6)]
    await asyncio.gather(*(stream.reached(3) for stream in streams))
    assert leaving.process is not None
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


async def helm_test(node: Node) -> None:
    """What `helm test` would run."""
    (manifest,) = [m for m in node.manifests if m["kind"] == "Pod"]
    (container,) = manifest["spec"]["containers"]
    (router,) = node.pods_of("demo")
    command = [part.replace("demo:", f"{router.ip}:") for part in [*container["command"], *container["args"]]]
    process = await asyncio.create_subprocess_exec(
        str(BIN / command[0]), *command[1:], stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    said = (await process.stdout.read()).decode()
    assert await process.wait() == 0, said
    assert "1 finished" in said
