"""Clusters with the HTTP API, and clients of it."""

import http.client
import json
import os
import shutil
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

TOOL_TEMPLATE = """{{- bos_token -}}
{%- if tools -%}<|system|>Tools: {{ tools | tojson }}{{ eos_token }}{%- endif -%}
{%- for message in messages -%}
{{- '<|' + (message.role if message.role != 'tool' else 'user') + '|>' + message.content -}}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>
{%- endfor -%}
{{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
"""One that has a place for tools, for a model whose own has none."""


def http_cluster(model: Path, decode: int = 1, router: dict[str, Any] | None = None, **worker: Any) -> LocalCluster:
    """A router that serves HTTP too, and workers."""
    settings = {"model": model, "kv_memory_mib": 32} | worker
    router_settings = {"model": model, "port": 0, "http_port": 0} | (router or {})
    cores = sorted(os.sched_getaffinity(0))
    return LocalCluster(plan_topology(1, decode, router_settings, settings, cores))


def with_tools(model: Path, path: Path, template: str = TOOL_TEMPLATE, **config: Any) -> Path:
    """The same model in another directory, with a chat template that takes tools, and changes of its config."""
    path.mkdir()
    for file in model.iterdir():
        shutil.copy(file, path / file.name)
    for name, change in (("tokenizer_config.json", {"chat_template": template}), ("config.json", config)):
        (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | change))
    return path


class RawConnection:
    """One that sends whatever it is told to, and reads no sooner than it is told to."""

    def __init__(self, address: str, receive_bytes: int | None = None) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.socket()
        if receive_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._socket.settimeout(30)
        self._socket.connect((host, int(port)))

    def post(self, path: str, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        self._socket.sendall(head.encode() + content)

    def send(self, content: bytes) -> None:
        self._socket.sendall(content)

    def read(self, num_bytes: int) -> bytes:
        """So many at most; empty at the end."""
        return self._socket.recv(num_bytes)

    def first_line(self, within_s: float) -> str:
        """First line of an answer that comes within a time; else empty."""
        self._socket.settimeout(within_s)
        try:
            return self._socket.recv(1000).decode().partition("\r\n")[0]
        except TimeoutError:
            return ""

    def answer(self) -> tuple[int, bytes]:
        """(status, body), read to its end."""
        with http.client.HTTPResponse(self._socket) as response:
            response.begin()
            return response.status, response.read()

    def end_sending(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def peek(self) -> bool:
        """Wait for an answer; False where there is none, but an end."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except ConnectionResetError:
            return False

    def close(self) -> None:
        self._socket.close()


def call(
    address: str, path: str, body: bytes | dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], Any]:
    """(status, headers, JSON) of one request; without a body a GET."""
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request("GET" if content is None else "POST", path, content, headers or {})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, json.loads(answer.read())
