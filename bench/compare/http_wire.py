"""A mock engine and a load client over plain HTTP, which take little CPU, so that the router between them is measured.

`python -m bench.compare.http_wire COUNT STEP_MS` serves COUNT mock engines and prints their ports.
"""

import asyncio
import json
import re
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, cast

import uvloop

MODEL_NAME = "m"
"""Name of the model, which is that of its folder."""

ANSWER_S = 120.0
"""Seconds that the client waits for the end of an answer."""
TAIL_BYTES = 64
"""Bytes in which the end of an answer is looked for."""
END = b"data: [DONE]\n\n"
WORD = re.compile(rb"w\d")
"""Beginning of a token's text. Tokens are counted, not events, since a router may join those of a late client."""


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_BODY = {"id": "c", "object": "text_completion", "model": MODEL_NAME, "choices": [{"index": 0, "text": "w7 "}]}
TOKEN = _chunk(b"data: " + json.dumps(_BODY).encode() + b"\n\n")
LAST = _chunk(END) + b"0\r\n\r\n"
_CHOICE = {"index": 0, "text": "w7 ", "token_ids": [7]}
TOKEN_ID = _chunk(b"data: " + json.dumps(_BODY | {"choices": [_CHOICE]}).encode() + b"\n\n")
_CHOICES = [_CHOICE | {"finish_reason": "length"}]
LAST_TOKEN_ID = _chunk(b"data: " + json.dumps(_BODY | {"choices": _CHOICES}).encode() + b"\n\n") + LAST
METRICS = b"""vllm:cache_config_info{block_size="16",num_gpu_blocks="100000",enable_prefix_caching="True"} 1.0
vllm:num_requests_running{model_name="m"} 0.0
vllm:num_requests_waiting{model_name="m"} 0.0
vllm:kv_cache_usage_perc{model_name="m"} 0.0
vllm:generation_tokens_total{model_name="m"} %d
"""
"""Page of the figures that a router reads of vLLM's."""


Tokens = tuple[bytes, bytes]
"""Bytes of a token, and of the last one."""


class Steps:
    """Steps of a batching engine: a request waits for the running step, and each step gives it a token."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._arrived: dict[asyncio.WriteTransport, tuple[int, Tokens]] = {}
        self._running: dict[asyncio.WriteTransport, tuple[int, Tokens]] = {}
        self.count = 0
        """Steps so far."""
        self._is_running = False

    def add(self, transport: asyncio.WriteTransport, num_tokens: int, tokens: Tokens) -> None:
        """Start an answer of so many tokens."""
        self._arrived[transport] = num_tokens, tokens
        if not self._is_running:
            self._is_running = True
            self._begin()

    def _begin(self) -> None:
        self._running |= self._arrived
        self._arrived = {}
        asyncio.get_running_loop().call_later(self._step_s, self._end)

    def _end(self) -> None:
        self.count += 1
        for transport, (left, tokens) in tuple(self._running.items()):
            if transport.is_closing():
                del self._running[transport]
                continue
            transport.write(tokens[left <= 1])
            self._running[transport] = left - 1, tokens
            if left == 1:
                del self._running[transport]
        self._is_running = bool(self._running or self._arrived)
        if self._is_running:
            self._begin()


class MockEngine(asyncio.Protocol):
    """Connection of a mock engine."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            size = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
            if len(self._received) < end + 4 + size:
                return
            body, self._received = self._received[end + 4 : end + 4 + size], self._received[end + 4 + size :]
            method, path = head.split(b" ", 2)[:2]
            if method == b"post":
                self._post(path, json.loads(body))
            else:
                self._get(path)

    def _post(self, path: bytes, body: dict[str, Any]) -> None:
        has_ids = bool(body.get("return_token_ids"))
        if path != b"/v1/completions":
            self._answer(b"{}", b"404 Not Found")
        elif has_ids and not body.get("stream"):
            choice = {"index": 0, "text": "w7 ", "token_ids": [7], "prompt_token_ids": body["prompt"]}
            self._answer(json.dumps(_BODY | {"choices": [choice | {"finish_reason": "length"}]}).encode())
        else:
            self._transport.write(HEAD)
            tokens = (TOKEN_ID, LAST_TOKEN_ID) if has_ids else (TOKEN, TOKEN + LAST)
            self._steps.add(self._transport, int(body["max_tokens"]), tokens)

    def _get(self, path: bytes) -> None:
        if path == b"/metrics":
            self._answer(METRICS % self._steps.count)
        elif path == b"/version":
            self._answer(b'{"version": "0.32.0"}')
        else:
            about = {"id": MODEL_NAME, "object": "model", "owned_by": "bench"}
            answer = {"object": "list", "data": [about], "model_path": MODEL_NAME, "served_model_name": MODEL_NAME}
            self._answer(json.dumps(answer).encode())

    def _answer(self, body: bytes, status: bytes = b"200 OK") -> None:
        fields = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(fields % (status, len(body)) + body)


@dataclass(slots=True)
class HttpReply:
    """One answered request, in seconds."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0
    failure: str = ""


class _Connection(asyncio.Protocol):
    """Connection of the client; one request at a time."""

    def __init__(self, client: "HttpClient") -> None:
        self._client = client
        self._answer: HttpReply | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by its class

    def ask(self, request: bytes, done: "asyncio.Future[HttpReply]") -> None:
        self._answer, self._done, self._tail, self._started_at = HttpReply(), done, b"", time.monotonic()
        self._transport.write(request)
        self._acknowledge()

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        now = time.monotonic()
        self._acknowledge()
        if self._tail == b"" and not data.startswith(b"HTTP/1.1 200"):
            answer.failure = data[:200].decode(errors="replace")
            self._transport.close()
            self._finish()
            return
        answer.num_tokens += len(WORD.findall(self._tail[-1:] + data))
        if answer.num_tokens and not answer.ttft_s:
            answer.ttft_s = now - self._started_at
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if b"[DONE]" in self._tail and self._tail.endswith(b"0\r\n\r\n"):
            self._end(now)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._client.idle:
            self._client.idle.remove(self)
        if self._answer is not None:
            self._answer.failure = self._answer.failure or "the connection was lost"
            self._finish()

    def _acknowledge(self) -> None:
        """Acknowledge at once: some routers leave Nagle's algorithm on, and would wait 40 ms for it."""
        self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _end(self, now: float) -> None:
        assert self._answer is not None
        self._answer.total_s = now - self._started_at
        self._client.idle.append(self)
        self._finish()

    def _finish(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not self._done.done():
            self._done.set_result(answer)


class HttpClient:
    """Client that keeps connections and sends prepared requests."""

    def __init__(self, host: str, port: int) -> None:
        self._where = host, port
        self.idle: deque[_Connection] = deque()

    async def ask(self, request: bytes) -> HttpReply:
        connection = self.idle.pop() if self.idle else None
        if connection is None:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(lambda: _Connection(self), *self._where)
        done: asyncio.Future[HttpReply] = asyncio.get_running_loop().create_future()
        connection.ask(request, done)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await done
        except TimeoutError:
            return HttpReply(failure=f"no end within {ANSWER_S:g} s")

    @staticmethod
    def request(prompt: str, max_tokens: int) -> bytes:
        """Return the bytes of a streamed completion."""
        wanted = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        body = json.dumps(wanted).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        return head.encode() + b"\r\n\r\n" + body


async def serve(count: int, step_s: float) -> None:
    loop = asyncio.get_running_loop()

    async def start() -> int:
        steps = Steps(step_s)
        server = await loop.create_server(lambda: MockEngine(steps), "127.0.0.1", 0, backlog=8192)
        servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    servers: list[asyncio.Server] = []
    print(*[await start() for _ in range(count)], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until the benchmark closes it


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1e3))
