"""Executor for pools that are Deployments, through their `scale` subresource as the pod's service account.

Kubernetes chooses which pod ends, and sends it SIGTERM, so it drains (docs/kubernetes-upgrades.md). The account needs
`get` and `patch` of `deployments/scale` in one namespace.
"""

import asyncio
import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from cluster.errors import StartError
from cluster.network.kubernetes import ApiServer, ApiServerSettings
from cluster.roles import ROLES, Role
from planner.executors.executor import Executor, ExecutorFailed

TIMEOUT_S = 10.0
MOST_BYTES = 1 << 20
"""Largest accepted answer, in bytes."""
LONGEST_REASON = 300


class KubernetesConfig(ApiServerSettings):
    """Location of the pools."""

    prefill: str = ""
    """Name of the prefill Deployment; empty leaves that pool alone."""
    decode: str = ""
    """Name of the decode Deployment; empty leaves that pool alone."""
    kind: str = Field(default="deployments", pattern=r"^(deployments|statefulsets)$")
    """Kind of the pools."""
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
        self._names: dict[Role, str] = {role: getattr(config, role) for role in ROLES if getattr(config, role)}
        if not self._names:
            raise StartError("kubernetes.decode", "is missing: name the decode pool, the prefill pool or both")
        self._read_only = config.read_only
        self._server = ApiServer.of(config, "kubernetes")
        namespace = config.namespace or self._server.namespace("kubernetes.namespace")
        self._path = f"/apis/apps/v1/namespaces/{namespace}/{config.kind}"

    async def sizes(self) -> Mapping[Role, int]:
        scales = await asyncio.gather(*(self._scale_of(name) for name in self._names.values()))
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
            return http.client.HTTPConnection(host, server.port, timeout=TIMEOUT_S)
        return http.client.HTTPSConnection(host, server.port, timeout=TIMEOUT_S, context=tls)
