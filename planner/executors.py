"""Interface of executors, and the executor that does nothing.

Executor that only switches roles, by a call to the worker, for clusters where it cannot start workers.

Executor for pools that are Deployments, through their `scale` subresource as the pod's service account.

Kubernetes chooses which pod ends, and sends it SIGTERM, so it drains (docs/kubernetes-upgrades.md). The account needs
`get` and `patch` of `deployments/scale` in one namespace.
"""

import asyncio
import http.client
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import grpc
from pydantic import Field

from cluster.errors import StartError, TandemError
from cluster.network.error_status import from_rpc_error
from cluster.network.kubernetes import ApiServer, ApiServerSettings
from cluster.network.rpc import channel
from cluster.network.tls import TlsIdentity
from cluster.process.tasks import all_of, outcomes_of
from cluster.roles import ON_WIRE, ROLES, Role
from protos import inference_pb2 as pb
from protos import membership_pb2, membership_pb2_grpc


class ExecutorFailed(TandemError):
    """A failure to carry out desired sizes.

    The next round asks for all of them again.
    """


class Executor(ABC):
    """Interface used from one event loop, one call at a time.

    Every call may raise ExecutorFailed without side effects.
    """

    scales: bool = True
    """Whether the executor can start and stop workers."""
    switches: bool = False
    """Whether `switch` may be called."""

    @abstractmethod
    async def sizes(self) -> Mapping[Role, int]:
        """Return the number of workers last asked for, per role.

        Unknown roles are left out.
        """

    @abstractmethod
    async def scale(self, role: Role, count: int) -> None:
        """Set the number of workers.

        Returns when the change is in progress; removed workers drain first.
        """

    async def switch(self, workers: Sequence[pb.WorkerStatus], role: Role) -> None:
        """Switch these workers to `role`.

        Returns when they have it and `sizes` shows it.
        """
        raise ExecutorFailed(f"this executor cannot switch workers to {role}")

    async def close(self) -> None:  # noqa: B027 # most executors hold nothing
        """Release resources; no call follows."""


class NoExecutor(Executor):
    """Executor that does nothing: desired sizes are metrics for an autoscaler of your own."""

    async def sizes(self) -> Mapping[Role, int]:
        return {}

    async def scale(self, role: Role, count: int) -> None:
        """Do nothing."""


SWITCH_TIMEOUT_S = 120.0
"""Seconds for all streams of a worker to end or be handed over."""


async def switch_role(address: str, role: Role, trust: TlsIdentity | None, timeout_s: float = SWITCH_TIMEOUT_S) -> int:
    """Switch the worker at `address` to `role`; return the number of requests it handed over.

    Raises ServiceError.
    """
    async with channel(address, trust) as link:
        request = membership_pb2.SwitchRoleRequest(role=ON_WIRE[role])
        try:
            reply = await membership_pb2_grpc.WorkerStub(link).SwitchRole(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
    handed_over: int = reply.handed_over
    return handed_over


class Switcher(Executor):
    """Executor over a fixed number of workers, whose roles follow the load."""

    scales, switches = False, True

    def __init__(self, trust: TlsIdentity | None) -> None:
        self._trust = trust

    async def sizes(self) -> Mapping[Role, int]:
        return {}

    async def scale(self, role: Role, count: int) -> None:
        """Do nothing: the number of workers is fixed, and a larger desired size is a metric only."""

    async def switch(self, workers: Sequence[pb.WorkerStatus], role: Role) -> None:
        switching = (switch_role(worker.address, role, self._trust) for worker in workers)
        outcomes = await outcomes_of(switching)
        failed = [
            f"{worker.worker_id}: {outcome}"
            for worker, outcome in zip(workers, outcomes, strict=True)
            if isinstance(outcome, Exception)
        ]
        if failed:
            raise ExecutorFailed("; ".join(failed))


ANSWER_TIMEOUT_S = 10.0
MOST_BYTES = 1 << 20
"""Largest accepted answer, in bytes."""
LONGEST_REASON = 300
POOL_NAME = r"^(((deployments|statefulsets)/)?[^/]+)?$"


class KubernetesConfig(ApiServerSettings):
    """Location of the pools."""

    prefill: str = Field(default="", pattern=POOL_NAME)
    """Prefill pool: a Deployment's name, or statefulsets/NAME; empty leaves that pool alone."""
    decode: str = Field(default="", pattern=POOL_NAME)
    """Decode pool, likewise."""
    namespace: str = ""
    """Namespace. Default: the planner's own."""
    read_only: bool = False
    """Whether sizes are read and never changed, because something else scales the pools by the planner's metrics. The
    account then needs `get` only."""


class KubernetesExecutor(Executor):
    """Executor that patches `replicas` where they differ from the desired number."""

    def __init__(self, config: KubernetesConfig) -> None:
        """Read the account and the settings.

        Raises StartError.
        """
        names = {role: getattr(config, role) for role in ROLES}
        self._names: dict[Role, str] = {
            role: name if "/" in name else f"deployments/{name}" for role, name in names.items() if name
        }
        if not self._names:
            raise StartError("kubernetes.decode", "is missing: name the decode pool, the prefill pool or both")
        self._read_only = config.read_only
        self._server = ApiServer.of(config, "kubernetes")
        namespace = config.namespace or self._server.namespace("kubernetes.namespace")
        self._path = f"/apis/apps/v1/namespaces/{namespace}"

    async def sizes(self) -> Mapping[Role, int]:
        scales = await all_of(self._scale_of(name) for name in self._names.values())
        return dict(zip(self._names, scales, strict=True))

    async def scale(self, role: Role, count: int) -> None:
        if self._read_only or (name := self._names.get(role)) is None or await self._scale_of(name) == count:
            return
        await asyncio.to_thread(self._ask, "PATCH", name, {"spec": {"replicas": count}})

    async def _scale_of(self, name: str) -> int:
        answer = await asyncio.to_thread(self._ask, "GET", name, None)
        replicas = answer.get("spec", {}).get("replicas", 0)  # the API omits 0
        if not isinstance(replicas, int) or replicas < 0:
            raise ExecutorFailed(f"{name}: spec.replicas is {replicas!r}, not a number from 0")
        return replicas

    def _ask(self, method: str, name: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Send one request, on a thread."""
        headers = {"Accept": "application/json", "Content-Type": "application/merge-patch+json"}
        connection = self._connect()
        try:
            headers["Authorization"] = f"Bearer {self._server.token()}"
            content = None if body is None else json.dumps(body)
            connection.request(method, f"{self._path}/{name}/scale", content, headers)
            answer = connection.getresponse()
            raw = answer.read(MOST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise ExecutorFailed(f"{method} of {name}'s scale: {error or type(error).__name__}") from None
        finally:
            connection.close()
        try:
            reply = json.loads(raw)
        except ValueError:
            reply = None
        if answer.status != http.client.OK or not isinstance(reply, dict):
            message = reply.get("message", "") if isinstance(reply, dict) else raw.decode(errors="replace")
            reason = f"{answer.status} {answer.reason} {message}"[:LONGEST_REASON]
            raise ExecutorFailed(f"{method} of {name}'s scale: {reason.strip()}")
        return reply

    def _connect(self) -> http.client.HTTPConnection:
        server, tls = urlsplit(self._server.url), self._server.tls
        host = server.hostname or ""
        if tls is None:
            return http.client.HTTPConnection(host, server.port, timeout=ANSWER_TIMEOUT_S)
        return http.client.HTTPSConnection(host, server.port, timeout=ANSWER_TIMEOUT_S, context=tls)
