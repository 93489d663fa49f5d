"""A small API server of Kubernetes that lists and watches EndpointSlices and pods, by HTTPS, and checks the token."""

import asyncio
import json
import ssl
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from support.certificates import Authority

Resource = dict[str, Any]
PATHS = {
    "endpointslices": "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
    "pods": "/api/v1/namespaces/{namespace}/pods",
}


class WatchApi:
    """An async context manager. Its account's files, `token`, `ca.crt` and `namespace`, are in `account`."""

    def __init__(self, account: Path) -> None:
        authority = Authority(account, "kubernetes")
        issued = authority.issue("api-server")
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(issued.cert, issued.key)
        self._account = account
        self.token = ""
        self.rotate_token("first")
        (account / "ca.crt").write_bytes(authority.path.read_bytes())
        (account / "namespace").write_text("serving\n")
        self.version = 100
        self._oldest = 100
        self._resources: dict[tuple[str, str, str], Resource] = {}
        """By plural, namespace and name."""
        self._events: list[tuple[int, str, str, Resource]] = []
        """Version, plural, type and object."""
        self._changed = asyncio.Condition()
        self._watches: set[web.StreamResponse] = set()
        self.calls: list[tuple[str, Mapping[str, str]]] = []
        """Path and parameters of each call that had the token."""
        self.num_refused = 0
        """Calls without the token."""
        self.failing = 0
        """So many calls to come are answered with 500."""
        self.bookmark = False
        """Whether a watch that has told what happened before it sends a bookmark."""

    async def __aenter__(self) -> "WatchApi":
        app = web.Application()
        for plural, path in PATHS.items():
            app.router.add_get(path, partial(self._answer, plural))
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await self.listen()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cut()
        await self._runner.cleanup()

    async def listen(self, port: int = 0) -> None:
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=self._tls)
        await site.start()
        self._site = site
        self.port = self._runner.addresses[0][1]

    async def leave(self) -> None:
        """Refuse connections, and cut those that there are, until `listen`."""
        await self._site.stop()
        self.cut()

    @property
    def settings(self) -> dict[str, str]:
        """Setting `kubernetes` of a fleet."""
        return {"api_server": f"https://127.0.0.1:{self.port}", "account_dir": str(self._account)}

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    def rotate_token(self, token: str) -> None:
        """Take another token only, and write it to the account."""
        self.token = token
        (self._account / "token").write_text(token)

    def cut(self) -> None:
        """Break the connections of all watches."""
        for watch in self._watches:
            request = watch._req  # noqa: SLF001 - aiohttp gives the connection of a response to nobody else
            assert request is not None
            if request.transport is not None:
                request.transport.abort()
        self._watches.clear()

    def expire(self) -> None:
        """Forget all events, so that a watch from before them gets 410."""
        self._oldest = self.version
        self._events.clear()

    async def put(self, plural: str, resource: Resource, namespace: str = "serving") -> None:
        key = plural, namespace, resource["metadata"]["name"]
        await self._record(plural, "MODIFIED" if key in self._resources else "ADDED", key, resource)

    async def delete(self, plural: str, name: str, namespace: str = "serving") -> None:
        key = plural, namespace, name
        await self._record(plural, "DELETED", key, self._resources[key])

    async def _record(self, plural: str, kind: str, key: tuple[str, str, str], resource: Resource) -> None:
        self.version += 1
        metadata = resource["metadata"] | {"namespace": key[1], "resourceVersion": str(self.version)}
        resource = resource | {"metadata": metadata}
        if kind == "DELETED":
            del self._resources[key]
        else:
            self._resources[key] = resource
        async with self._changed:
            self._events.append((self.version, plural, kind, resource))
            self._changed.notify_all()

    async def _answer(self, plural: str, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            self.num_refused += 1
            return _status(401, "Unauthorized")
        self.calls.append((request.path, dict(request.query)))
        if self.failing:
            self.failing -= 1
            return _status(500, "etcd is away")
        namespace, selector = request.match_info["namespace"], request.query["labelSelector"]
        if "watch" in request.query:
            return await self._watch(request, plural, namespace, selector)
        items = [
            resource
            for (of, inside, _), resource in self._resources.items()
            if (of, inside) == (plural, namespace) and _selects(selector, resource)
        ]
        return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})

    async def _watch(self, request: web.Request, plural: str, namespace: str, selector: str) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        if version < self._oldest:
            return _status(410, f"too old resource version: {version} ({self._oldest})")
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        self._watches.add(answer)
        try:
            is_new = True
            while True:
                if version < self._oldest:
                    gone = {"kind": "Status", "code": 410, "message": "too old"}
                    await answer.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                    return answer
                for number, of, kind, resource in list(self._events):
                    inside = resource["metadata"]["namespace"]
                    if number > version and (of, inside) == (plural, namespace) and _selects(selector, resource):
                        line = json.dumps({"type": kind, "object": resource}).encode() + b"\n"
                        await answer.write(line)
                    version = max(version, number)
                if is_new and self.bookmark:
                    mark = {"kind": "Pod", "metadata": {"resourceVersion": str(version)}}
                    await answer.write(json.dumps({"type": "BOOKMARK", "object": mark}).encode() + b"\n")
                is_new = False
                async with self._changed:
                    while self.version == version:
                        await self._changed.wait()
        except (ConnectionError, asyncio.CancelledError):
            return answer
        finally:
            self._watches.discard(answer)


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


def _selects(selector: str, resource: Resource) -> bool:
    """Return whether a label selector of equalities selects a resource."""
    labels = resource["metadata"].get("labels", {})
    return all(labels.get(each.partition("=")[0]) == each.partition("=")[2] for each in selector.split(","))


def endpoint_slice(
    name: str, service: str, endpoints: Mapping[str, Mapping[str, bool]], family: str = "IPv4"
) -> Resource:
    """Return an EndpointSlice; `endpoints`: conditions by address."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": family,
        "ports": [{"name": "http", "port": 80}],
        "endpoints": [{"addresses": [ip], "conditions": dict(each)} for ip, each in endpoints.items()] or None,
    }


def pod(name: str, ip: str = "", ready: bool = True, leaving: bool = False, **labels: str) -> Resource:
    metadata: Resource = {"name": name, "labels": labels}
    if leaving:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(ready)}]
    return {"metadata": metadata, "status": {"podIP": ip, "conditions": conditions} if ip else {}}
