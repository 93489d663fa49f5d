"""The cluster that KUBECONFIG names, through kubectl and helm, and one namespace of it for a trial."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from support.chart import CHART, HELM
from support.kubernetes.load import Load, Result
from support.kubernetes.plan import RELEASE, SMALL, Trial
from support.kubernetes.settings import Settings

KUBECTL = shutil.which("kubectl")
COMMAND_S = 600
"""Longest time of a command of kubectl or helm, in seconds."""
OURS = {"app.kubernetes.io/managed-by": "tandem-test"}
"""Label of all that the suite makes, besides releases of the chart."""
LOAD_PROGRAM = Path(__file__).with_name("load.py")


class CommandFailed(AssertionError):
    """A command of kubectl or helm failed; the message has its output."""


@dataclass(frozen=True)
class PodState:
    """State of one pod."""

    name: str
    node: str
    ip: str
    phase: str
    ready: bool
    leaving: bool
    """Whether it was told to stop."""
    labels: Mapping[str, str]

    @classmethod
    def of(cls, pod: dict[str, Any]) -> Self:
        """Read a pod as Kubernetes describes it."""
        status, metadata = pod.get("status", {}), pod["metadata"]
        ready = any(
            condition["type"] == "Ready" and condition["status"] == "True" for condition in status.get("conditions", [])
        )
        return cls(
            metadata["name"],
            pod["spec"].get("nodeName", ""),
            status.get("podIP", ""),
            status.get("phase", ""),
            ready,
            "deletionTimestamp" in metadata,
            metadata.get("labels", {}),
        )

    @property
    def component(self) -> str:
        """Component of the chart: router, prefill, decode, planner or redis; empty for other pods."""
        return self.labels.get("app.kubernetes.io/component", "")


def why_not() -> str:
    """Return why the suite cannot run here; empty where it can."""
    if not os.environ.get("KUBECONFIG"):
        return "KUBECONFIG is unset"
    if KUBECTL is None:
        return "no kubectl on PATH"
    if HELM is None:
        return "no helm: `make helm` gets it"
    try:
        asked = subprocess.run(
            [KUBECTL, "get", "--raw", "/version", "--request-timeout=15s"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"the cluster of KUBECONFIG ({os.environ['KUBECONFIG']}) does not answer"
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:] or ["no reason"]
        return f"the cluster of KUBECONFIG ({os.environ['KUBECONFIG']}) does not answer: {last[0]}"
    return ""


async def command(*arguments: str, stdin: str | None = None, check: bool = True) -> str:
    """Run a command and return what it printed, with its errors where it failed and `check` is not set.

    Raises CommandFailed where it fails and `check` is set.
    """
    process = await asyncio.create_subprocess_exec(
        *arguments,
        stdin=asyncio.subprocess.PIPE if stdin is not None else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            output, errors = await process.communicate(stdin.encode() if stdin is not None else None)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise CommandFailed(f"{' '.join(arguments)}: not over after {COMMAND_S} s") from None
    if not process.returncode:
        return output.decode()
    if check:
        raise CommandFailed(f"{' '.join(arguments)}: {errors.decode().strip()}\n{output.decode()}")
    return output.decode() + errors.decode()


async def kubectl(*arguments: str, stdin: str | None = None, check: bool = True) -> str:
    """Run kubectl on the whole cluster."""
    assert KUBECTL is not None
    return await command(KUBECTL, *arguments, stdin=stdin, check=check)


async def may(verb: str, resource: str, namespace: str = "") -> bool:
    """Return whether this account may do that."""
    scope = ("--namespace", namespace) if namespace else ("--all-namespaces",)
    return "yes" in (await kubectl("auth", "can-i", verb, resource, *scope, check=False)).splitlines()


async def schedulable_nodes() -> list[str]:
    """Return the ready nodes that take ordinary pods; none where this account may not list them."""
    listed = await kubectl("get", "nodes", "-o", "json", check=False)
    try:
        nodes = json.loads(listed)["items"]
    except json.JSONDecodeError:
        return []
    return schedulable(nodes)


def schedulable(nodes: list[dict[str, Any]]) -> list[str]:
    """Return the names of the ready nodes without a taint that keeps ordinary pods away."""
    return [
        node["metadata"]["name"]
        for node in nodes
        if not node["spec"].get("unschedulable")
        and not any(taint["effect"] in ("NoSchedule", "NoExecute") for taint in node["spec"].get("taints", []))
        and any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"]["conditions"])
    ]


class Site:
    """A namespace with one release of the chart."""

    def __init__(self, trial: Trial, settings: Settings, not_tried: list[tuple[str, str]]) -> None:
        self.trial = trial
        self.settings = settings
        self.namespace = f"{settings.namespace_prefix}-{trial.name}"
        self.values = trial.values_with(settings)
        self._not_tried = not_tried

    async def __aenter__(self) -> Self:
        await self._delete()
        labels = OURS | {"pod-security.kubernetes.io/enforce": "restricted"}
        metadata = {"name": self.namespace, "labels": labels}
        await self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})

        async def made() -> bool:
            return "default" in await self.kubectl("get", "serviceaccounts", "-o", "name")

        await self.until(made, "the namespace has its default account")
        for name in self.settings.pull_secrets:
            source = self.settings.pull_secret.partition("/")[0]
            secret = json.loads(await kubectl("--namespace", source, "get", "secret", name, "-o", "json"))
            await self.apply(secret | {"metadata": {"name": name, "labels": OURS}})
        return self

    async def _delete(self) -> None:
        """Delete the namespace, if there is one that this suite made."""
        found = await kubectl("get", "namespace", self.namespace, "-o", "json", "--ignore-not-found")
        if not found.strip():
            return
        labels = json.loads(found)["metadata"].get("labels", {})
        if not OURS.items() <= labels.items():
            raise CommandFailed(f"namespace {self.namespace} is not this suite's: set TANDEM_NAMESPACE_PREFIX")
        await kubectl("delete", "namespace", self.namespace, "--ignore-not-found", f"--timeout={COMMAND_S - 60}s")

    async def __aexit__(self, *exception: object) -> None:
        await self._delete()

    def could_not_try(self, what: str, reason: str) -> None:
        """Record a part of the trial that this cluster does not allow."""
        self._not_tried.append((f"{self.trial.name}: {what}", reason))

    async def account(self) -> str:
        """Return pods, events and the ends of logs, for a failed trial."""
        parts = [await self.kubectl("get", "pods", "-o", "wide", check=False)]
        parts.append(await self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False))
        selector = f"app.kubernetes.io/instance={RELEASE}"
        parts.append(await self.kubectl("logs", "-l", selector, "--tail=20", "--prefix", check=False))
        return "\n".join(part[-8000:] for part in parts)

    async def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        return await kubectl("--namespace", self.namespace, *arguments, stdin=stdin, check=check)

    async def apply(self, *manifests: dict[str, Any]) -> None:
        for manifest in manifests:
            scope = () if manifest["kind"] == "Namespace" else ("--namespace", self.namespace)
            await kubectl(*scope, "apply", "-f", "-", stdin=json.dumps(manifest))

    # ------------------------------------------------------------------------------------------ the release

    async def helm(self, *arguments: str, check: bool = True) -> str:
        assert HELM is not None
        return await command(HELM, *arguments, "--namespace", self.namespace, check=check)

    async def install(self, values: dict[str, Any] | None = None, *options: str, check: bool = True) -> str:
        """Install the release, or upgrade it, with the trial's values or others; wait until its pods are ready."""
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            json.dump(values or self.values, file)
            file.flush()
            said = await self.helm("upgrade", "--install", RELEASE, str(CHART), "-f", file.name, *options, check=check)
        if check:
            await self.settled()
        return said

    async def settled(self) -> None:
        """Wait until every Deployment and StatefulSet has replaced its pods, and all pods are ready."""
        workloads = (await self.kubectl("get", "deployments,statefulsets", "-o", "name")).split()
        for workload in workloads:
            await self.kubectl("rollout", "status", workload, f"--timeout={self.settings.wait_s}s")

        async def ready() -> bool:
            pods = await self.pods()
            return bool(pods) and all(pod.ready and not pod.leaving for pod in pods)

        await self.until(ready, "all pods are ready")

    async def pods(self, component: str = "") -> list[PodState]:
        """Return the release's pods, of one component where it is given; not that of `helm test`."""
        selector = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component"
        selector += f"={component}" if component else " notin (test,fit-check)"
        listed = json.loads(await self.kubectl("get", "pods", "-l", selector, "-o", "json"))
        return [PodState.of(pod) for pod in listed["items"]]

    async def size_of(self, workload: str) -> int:
        """Return `spec.replicas` of, for example, deployment/demo-simulated-decode."""
        return int(await self.kubectl("get", workload, "-o", "jsonpath={.spec.replicas}"))

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        give_up_at = time.monotonic() + float(self.settings.wait_s)
        while not await condition():
            assert time.monotonic() < give_up_at, f"waited {self.settings.wait_s} s in vain until {what}"
            await asyncio.sleep(1)

    # ------------------------------------------------------------------------------------------ ways to it

    @contextlib.asynccontextmanager
    async def forwarded(self, target: str, port: int) -> AsyncIterator[str]:
        """Forward a port of a Service or pod; yield the address here."""
        assert KUBECTL is not None
        process = await asyncio.create_subprocess_exec(
            KUBECTL, "--namespace", self.namespace, "port-forward", target, f":{port}",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            async with asyncio.timeout(60):
                first = (await process.stdout.readline()).decode()
            yield address_in(first)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()

    def pod(self, name: str, program: str, env: Mapping[str, str], **more: Any) -> list[dict[str, Any]]:
        """Return a pod of the suite's own that runs a Python program in the routers' image, and its ConfigMap."""
        labels = OURS | {"tandem-test": name}
        metadata = {"name": name, "labels": labels}
        container = {
            "name": name,
            "image": self.settings.router_reference,
            "imagePullPolicy": self.settings.pull_policy,
            "command": ["python", "/etc/program/program.py"],
            "env": [{"name": key, "value": value} for key, value in {"HOME": "/tmp", **env}.items()],
            "resources": SMALL,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [
                {"name": "program", "mountPath": "/etc/program", "readOnly": True},
                {"name": "tmp", "mountPath": "/tmp"},
                *more.get("mounts", []),
            ],
        }
        spec = {
            "restartPolicy": "Never",
            "imagePullSecrets": [{"name": each} for each in self.settings.pull_secrets],
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 5,
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [
                {"name": "program", "configMap": {"name": name}},
                {"name": "tmp", "emptyDir": {}},
                *more.get("volumes", []),
            ],
        }  # fmt: skip
        return [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"program.py": program}},
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
        ]

    async def output_of(self, name: str, program: str, **env: str) -> str:
        """Run a program in a pod to its end, and return what it printed."""
        await self.kubectl("delete", "pod", name, "--ignore-not-found")
        await self.apply(*self.pod(name, program, env))
        await self.ended(name)
        return await self.kubectl("logs", name)

    async def ended(self, name: str) -> None:
        """Wait until a pod has ended well."""

        async def over() -> bool:
            phase = await self.kubectl("get", "pod", name, "-o", "jsonpath={.status.phase}")
            assert phase != "Failed", await self.kubectl("logs", name, check=False)
            return phase == "Succeeded"

        await self.until(over, f"pod {name} has ended")

    # ------------------------------------------------------------------------------------------------ load

    @contextlib.asynccontextmanager
    async def load(self, load: Load, **more: Any) -> AsyncIterator[Callable[[], Awaitable[Result]]]:
        """Send load from a pod through the Service; yield a function that ends it and returns its result."""
        name = "load"
        await self.kubectl("delete", "pod", name, "--ignore-not-found")
        env = {"LOAD": json.dumps(load.__dict__)}
        await self.apply(*self.pod(name, LOAD_PROGRAM.read_text(), env, **more))

        async def begun() -> bool:
            phase = await self.kubectl("get", "pod", name, "-o", "jsonpath={.status.phase}")
            said = await self.kubectl("logs", name, check=False)
            assert phase != "Failed", said
            return '"begun"' in said

        await self.until(begun, "the load has begun")

        async def end() -> Result:
            await self.pause()
            if not load.once:
                await self.kubectl("exec", name, "--", "sh", "-c", "kill -TERM 1")
            await self.ended(name)
            return result_in(await self.kubectl("logs", name))

        yield end

    async def pause(self) -> None:
        """Let the load run undisturbed for a while."""
        await asyncio.sleep(float(self.settings.load_s))

    async def evict(self, pod: str) -> None:
        """Evict a pod as `kubectl drain` does: again and again, while a PodDisruptionBudget forbids it."""
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"

        async def evicted() -> bool:
            said = await self.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction), check=False)
            return "Success" in said or "NotFound" in said

        await self.until(evicted, f"{pod} may be evicted")


def address_in(line: str) -> str:
    """Return the address in the first line of `kubectl port-forward`."""
    found = re.search(r"Forwarding from (127\.0\.0\.1:\d+) ->", line)
    assert found is not None, f"kubectl port-forward: {line}"
    return found[1]


def result_in(log: str) -> Result:
    """Return the result in the log of a load."""
    for line in reversed(log.splitlines()):
        if line.startswith("{") and (said := json.loads(line)).pop("event") == "ended":
            return Result(**said)
    raise AssertionError(f"the load has printed no result: {log[-2000:]}")
