"""A server with OpenAI's completions API and vLLM's metrics and KV events, that fails as it is told to.

Its tokens are a function of all tokens before them, so that a stream which went on at another one can be checked.
"""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from bench.fleet.tokens import mixed

FIRST, NUM = 100, 1900
BLOCK = 16


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    state = 0
    for token_id in prompt:
        state = mixed(state, token_id)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(FIRST + state % NUM)
        state = mixed(state, tokens[-1])
    return tokens


@dataclass(slots=True)
class Script:
    """What a server does; may be changed while it runs."""

    refuses_with: int = 0
    """Status of all completions; 0: it answers them."""
    breaks_after: int | None = None
    """Tokens after which it breaks off the next streams; None: it ends them."""
    waits_after: int | None = None
    """Tokens after which streams stand still until `go_on`."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    returns_token_ids: bool = True
    takes_token_ids: bool = True
    is_vllm: bool = True
    stands_still: bool = False
    """Whether it answers nothing at all."""
    tells_cached: int | None = None
    api_key: str = ""
    connector: bool = False
    step_s: float = 0.0


class ScriptedServer:
    """Async context manager of a server."""

    def __init__(self, model: str = "m", root: str = "", **script: Any) -> None:
        self.script = Script(**script)
        self.bodies: list[dict[str, Any]] = []
        """Bodies of the completions, the probe's not among them."""
        self.num_open = 0
        self._model, self._root = model, root
        self._steps = 0
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def worker_id(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.script.go_on.set()
        self.script.stands_still = False
        await self._runner.cleanup()

    async def _answered(self, request: web.Request) -> None:
        while self.script.stands_still:  # noqa: ASYNC110 # any test sets this field
            await asyncio.sleep(0.01)
        if self.script.api_key and request.headers.get("Authorization") != f"Bearer {self.script.api_key}":
            raise web.HTTPUnauthorized(text='{"error": {"message": "no key"}}')

    async def _models(self, request: web.Request) -> web.Response:
        await self._answered(request)
        about = {"id": self._model, "root": self._root or self._model, "max_model_len": 2048}
        adapter = {"id": "poet", "root": "/adapters/poet", "parent": self._model}
        return web.json_response({"object": "list", "data": [about, adapter]})

    async def _version(self, request: web.Request) -> web.Response:
        if not self.script.is_vllm:
            raise web.HTTPNotFound
        return web.json_response({"version": "0.32.0"})

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._answered(request)
        if not self.script.is_vllm:
            raise web.HTTPNotFound
        lines = [
            f'vllm:cache_config_info{{block_size="{BLOCK}",enable_prefix_caching="True",num_gpu_blocks="500"}} 1.0',
            f'vllm:num_requests_running{{engine="0"}} {float(self.num_open)}',
            'vllm:num_requests_waiting{engine="0"} 0.0',
            'vllm:kv_cache_usage_perc{engine="0"} 0.0',
            f'vllm:generation_tokens_total{{engine="0"}} {float(self._steps)}',
        ]
        if self.script.connector:
            lines.append("vllm:tandem_loans_given_total 0.0")
        return web.Response(text="\n".join(lines) + "\n")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        await self._answered(request)
        body, script = await request.json(), self.script
        if isinstance(body["prompt"], list) and not script.takes_token_ids:
            return web.json_response({"error": {"message": "prompt must be a string"}}, status=422)
        if not body.get("stream"):  # the probe
            choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": "length"}
            if script.returns_token_ids:
                choice["token_ids"] = [FIRST]
            return web.json_response({"choices": [choice]})
        self.bodies.append(body)
        if script.refuses_with:
            return web.json_response({"error": {"message": "as the script says"}}, status=script.refuses_with)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self.num_open += 1
        try:
            await self._stream(request, answer, body)
        finally:
            self.num_open -= 1
        return answer

    async def _stream(self, request: web.Request, answer: web.StreamResponse, body: dict[str, Any]) -> None:
        script, count = self.script, body["max_tokens"]
        by_text = isinstance(body["prompt"], str)
        tokens = expected_tokens([len(body["prompt"])] if by_text else body["prompt"], count)
        for number, token_id in enumerate(tokens):
            if number == script.waits_after:
                await script.go_on.wait()
            if number == script.breaks_after:
                assert request.transport is not None
                request.transport.close()
                return
            await asyncio.sleep(script.step_s)
            self._steps += 1
            finish = "length" if number == count - 1 else None
            parts = []
            for index in range(body.get("n", 1)):
                part: dict[str, Any] = {"index": index, "text": f" t{token_id}", "finish_reason": finish}
                if script.returns_token_ids:
                    part["token_ids"] = [token_id]
                parts.append(part)
            await _send(answer, {"choices": parts})
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        if script.tells_cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": script.tells_cached}
        await _send(answer, {"choices": [], "usage": usage})
        await answer.write(b"data: [DONE]\n\n")


async def _send(answer: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


class Publisher:
    """Context manager of a publisher of KV events, which can lose batches, and of their replay."""

    def __init__(self, replays: bool = True) -> None:
        self._replays = replays
        self._batches: list[bytes] = []

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PUB)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._replay = self._context.socket(zmq.ROUTER)
        self.replay_port = self._replay.bind_to_random_port("tcp://127.0.0.1")
        self._serving = asyncio.ensure_future(self._serve()) if self._replays else None
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
        self._context.destroy(linger=0)

    @property
    def entry(self) -> dict[str, Any]:
        return {"kv_events_port": self.port, "kv_replay_port": self.replay_port}

    def restart(self) -> None:
        """Begin again as another process would."""
        self._batches = []

    async def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        number, packed = len(self._batches), msgspec.msgpack.encode([0.0, events, 0])
        self._batches.append(packed)
        if not lost:
            await self._socket.send_multipart([b"", number.to_bytes(8, "big"), packed])

    async def _serve(self) -> None:
        while True:
            who, _, first = await self._replay.recv_multipart()
            for number, packed in enumerate(self._batches):
                if number >= int.from_bytes(first, "big"):
                    await self._replay.send_multipart([who, b"", b"", number.to_bytes(8, "big"), packed])
            await self._replay.send_multipart([who, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])


def stored(tokens: Sequence[int], first: int = 0) -> dict[str, Any]:
    """Return the event of the blocks of a prompt from number `first` on."""
    ends = range((first + 1) * BLOCK, len(tokens) + 1, BLOCK)
    return {
        "type": "BlockStored",
        "block_hashes": [hash(tuple(tokens[:end])) & 0xFFFF_FFFF_FFFF for end in ends],
        "parent_block_hash": hash(tuple(tokens[: first * BLOCK])) & 0xFFFF_FFFF_FFFF if first else None,
        "token_ids": list(tokens[first * BLOCK : (len(tokens) // BLOCK) * BLOCK]),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
