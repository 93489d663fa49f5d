"""A small API server that speaks the scale subresource of Deployments, as Kubernetes does, and checks the token."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SCALE = re.compile(r"^/apis/apps/v1/namespaces/([^/]+)/deployments/([^/]+)/scale$")


class ScaleApi:
    """A context manager. Deployments by (namespace, name), with their replicas."""

    def __init__(self, token: str, host: str = "127.0.0.1", **replicas: int) -> None:
        self.token = token
        self.replicas = {("serving", name): count for name, count in replicas.items()}
        self.requests: list[tuple[str, str]] = []
        self.failing = 0
        """So many requests to come are answered with 500."""
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                api._answer(self, None)

            def do_PATCH(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Type"] != "application/merge-patch+json":
                    api._say(self, 415, {"message": "the media type is not supported"})
                    return
                api._answer(self, json.loads(body))

            def log_message(self, *arguments: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self.url = f"http://{host}:{self._server.server_port}"

    def __enter__(self) -> "ScaleApi":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler, patch: dict[str, Any] | None) -> None:
        self.requests.append((handler.command, handler.path))
        found = SCALE.match(handler.path)
        if handler.headers["Authorization"] != f"Bearer {self.token}":
            self._say(handler, 401, {"kind": "Status", "message": "Unauthorized"})
        elif self.failing:
            self.failing -= 1
            self._say(handler, 500, {"kind": "Status", "message": "etcd is away"})
        elif found is None or (key := (found[1], found[2])) not in self.replicas:
            self._say(handler, 404, {"kind": "Status", "message": "not found"})
        else:
            if patch is not None:
                self.replicas[key] = patch["spec"]["replicas"]
            spec = {"replicas": self.replicas[key]} if self.replicas[key] else {}
            self._say(handler, 200, {"kind": "Scale", "apiVersion": "autoscaling/v1", "spec": spec})

    @staticmethod
    def _say(handler: BaseHTTPRequestHandler, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)
