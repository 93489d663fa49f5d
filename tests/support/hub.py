"""A small server that speaks what huggingface_hub asks of the Hugging Face Hub, over local directories."""

import contextlib
import json
import re
import threading
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

INFO = re.compile(r"^/api/models/([^/]+/[^/]+)/revision/([^/?]+)")
TREE = re.compile(r"^/api/models/([^/]+/[^/]+)/tree/([^/?]+)")
FILE = re.compile(r"^/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)")
EXPIRED = "expired"
"""A token that was good once."""


@dataclass(slots=True)
class Served:
    """A repository."""

    revisions: dict[str, Path]
    """Directories by branch or tag."""
    token: str = ""
    """Without this token it does not exist, as private ones."""
    gated: bool = False
    """Anybody sees its files' names, and nobody without the token its files."""

    def commit(self, revision: str) -> str:
        return sha1(f"{revision}{self.revisions[revision]}".encode()).hexdigest()

    def find(self, revision: str) -> tuple[str, Path] | None:
        """Commit and directory of a branch, a tag or a commit."""
        for name, directory in self.revisions.items():
            if revision in (name, self.commit(name)):
                return self.commit(name), directory
        return None


@dataclass
class Hub:
    """A context manager."""

    repositories: dict[str, Served] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)
    """Files by name, whose next answer breaks off after so many bytes."""
    holds: dict[str, int] = field(default_factory=dict)
    """Likewise, but the rest waits until `release` is set."""
    release: threading.Event = field(default_factory=threading.Event)
    failing: int = 0
    """Status of every answer, where it is set."""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and Range of each request."""

    def bodies(self, ending: str = "") -> list[str]:
        """Names of the files that were read, one for each read, with what of it was asked for."""
        found = [(FILE.match(path), part) for method, path, part in self.requests if method == "GET"]
        names = [f"{match[3]} {part}".strip() for match, part in found if match is not None]
        return [name for name in names if name.partition(" ")[0].endswith(ending)]

    def __enter__(self) -> "Hub":
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub._answer(self)

            def do_GET(self) -> None:
                hub._answer(self)

            def log_message(self, *arguments: object) -> None:
                """Nothing."""

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):  # who asked is gone
                    super().handle()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        path, part = unquote(handler.path), handler.headers.get("Range", "")
        self.requests.append((handler.command, path, part))
        if self.failing:
            return self._refuse(handler, self.failing, "")
        for form in (INFO, TREE, FILE):
            if match := form.match(handler.path):
                break
        else:
            return self._refuse(handler, 404, "")
        served = self.repositories.get(match[1])
        token = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        if token == EXPIRED:
            return self._say(handler, 401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        granted = served is not None and (not served.token or token == served.token)
        if served is None or not (granted or served.gated):
            return self._refuse(handler, 404 if token else 401, "RepoNotFound")
        if form is FILE and not granted:
            return self._refuse(handler, 403 if token else 401, "GatedRepo")
        if (found := served.find(unquote(match[2]))) is None:
            return self._refuse(handler, 404, "RevisionNotFound")
        commit, directory = found
        if form is FILE:
            return self._send(handler, commit, directory / unquote(match[3]), part)
        if form is INFO:
            answer: Any = {"id": match[1], "modelId": match[1], "sha": commit, "private": bool(served.token)}
        else:
            answer = [_entry(directory, file) for file in sorted(directory.rglob("*")) if file.is_file()]
        return self._say(handler, 200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send(self, handler: BaseHTTPRequestHandler, commit: str, file: Path, part: str) -> None:
        content = file.read_bytes()
        headers = {"ETag": f'"{sha256(content).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        first = int(part.removeprefix("bytes=").rstrip("-")) if part else 0
        if part:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self._say(handler, 206 if part else 200, content[first:], headers, file.name)

    def _refuse(self, handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self._say(handler, status, b"", {"X-Error-Code": code} if code else {})

    def _say(
        self, handler: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str], file: str = ""
    ) -> None:
        handler.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if (broken := self.breaks.pop(file, None)) is not None:
            handler.wfile.write(content[:broken])
            handler.close_connection = True
            return
        if (held := self.holds.pop(file, None)) is not None:
            handler.wfile.write(content[:held])
            self.release.wait()
            content = content[held:]
        handler.wfile.write(content)


def _entry(directory: Path, file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    entry: dict[str, Any] = {"type": "file", "path": str(file.relative_to(directory)), "size": len(content)}
    entry["oid"] = sha1(content).hexdigest()
    if file.suffix == ".safetensors":
        entry["lfs"] = {"oid": sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry
