"""A small API server that speaks the scale subresource of Deployments, as Kubernetes does, and checks the token."""

import json
import re
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.json_server import JsonServer

SCALE = re.compile(r"^/apis/apps/v1/namespaces/([^/]+)/deployments/([^/]+)/scale$")


class ScaleApi(JsonServer):
    """A context manager. Deployments by (namespace, name), with their replicas."""

    def __init__(self, token: str, host: str = "127.0.0.1", **replicas: int) -> None:
        self.token = token
        self.replicas = {("serving", name): count for name, count in replicas.items()}
        self.requests: list[tuple[str, str]] = []
        self.failing = 0
        """So many requests to come are answered with 500."""
        super().__init__(host)

    def answer(self, request: BaseHTTPRequestHandler) -> tuple[int, dict[str, Any]]:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        if body and request.headers["Content-Type"] != "application/merge-patch+json":
            return 415, {"message": "the media type is not supported"}
        self.requests.append((request.command, request.path))
        found = SCALE.match(request.path)
        if request.headers["Authorization"] != f"Bearer {self.token}":
            return 401, {"kind": "Status", "message": "Unauthorized"}
        if self.failing:
            self.failing -= 1
            return 500, {"kind": "Status", "message": "etcd is away"}
        if found is None or (key := (found[1], found[2])) not in self.replicas:
            return 404, {"kind": "Status", "message": "not found"}
        if request.command == "PATCH":
            self.replicas[key] = json.loads(body)["spec"]["replicas"]
        spec = {"replicas": self.replicas[key]} if self.replicas[key] else {}
        return 200, {"kind": "Scale", "apiVersion": "autoscaling/v1", "spec": spec}
