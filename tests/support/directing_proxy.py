"""A proxy between an agent and a router that directs the model's first answer: one call of a tool.

The demo model cannot choose a call by itself. The proxy forces it by the API's own means: `tool_choice`, and a schema
of constants. The protocol, the grammar, the stream and the agent's reading of it are real.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, web

HOP = frozenset(("host", "content-length", "transfer-encoding", "connection", "content-encoding", "accept-encoding"))
"""Headers of one hop only."""
MAX_BODY = 16 << 20
MAX_TEXT_CHARS = 300


@dataclass
class Direction:
    """A call that the model is to make once: the first known tool of the agent's, with its arguments."""

    calls: Mapping[str, dict[str, Any]]
    """Arguments by name of the tool."""
    max_tokens: int = 400
    directed: list[str] = field(default_factory=list)
    """Names of the tools whose call was forced."""
    results: list[str] = field(default_factory=list)
    """Results of tools that the agent sent back, as JSON."""
    paths: list[str] = field(default_factory=list)

    def direct(self, path: str, body: dict[str, Any]) -> None:
        """Change a request's body."""
        kind = path.rstrip("/").rsplit("/", 1)[-1]
        self.paths.append(path)
        _shorten(body)
        self.results += [json.dumps(result) for result in results_of(kind, body)]
        for name in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
            if body.get(name, 0) and body[name] > self.max_tokens:
                body[name] = self.max_tokens
        if kind == "responses":
            body.setdefault("max_output_tokens", self.max_tokens)
        for tool in body.get("tools") or [] if not self.directed else []:
            holder = tool.get("function", tool)
            if holder.get("name") in self.calls:
                self._force(kind, body, holder)
                return

    def _force(self, kind: str, body: dict[str, Any], holder: dict[str, Any]) -> None:
        name = holder["name"]
        self.directed.append(name)
        schema = constant(self.calls[name])
        if kind == "messages":
            holder["input_schema"] = schema
            body["tool_choice"] = {"type": "tool", "name": name}
            return
        holder["parameters"] = schema
        named = {"name": name}
        body["tool_choice"] = {"type": "function"} | (named if kind == "responses" else {"function": named})


def _shorten(value: Any) -> None:
    """Cut long texts: agents' instructions have ten times the demo model's context."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(items):
        if isinstance(each, str) and len(each) > MAX_TEXT_CHARS:
            value[key] = each[:MAX_TEXT_CHARS]
        else:
            _shorten(each)


def constant(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of exactly these arguments."""
    return {
        "type": "object",
        "properties": {name: {"const": value} for name, value in arguments.items()},
        "required": list(arguments),
        "additionalProperties": False,
    }


def results_of(kind: str, body: dict[str, Any]) -> list[Any]:
    """Return the results of tools that a request brings."""
    if kind == "responses":
        items = body.get("input")
        items = items if isinstance(items, list) else []
        return [item["output"] for item in items if item.get("type") == "function_call_output"]
    messages = body.get("messages") or []
    if kind == "messages":
        blocks = [block for each in messages if isinstance(each["content"], list) for block in each["content"]]
        return [block["content"] for block in blocks if block.get("type") == "tool_result"]
    return [message["content"] for message in messages if message.get("role") == "tool"]


class DirectingProxy:
    """The proxy, at an address of its own."""

    def __init__(self, router: str, direction: Direction) -> None:
        self._router = router
        self._direction = direction
        self._runner: web.AppRunner | None = None
        self.address = ""

    async def __aenter__(self) -> "DirectingProxy":
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        if request.method == "POST" and content:
            body = json.loads(content)
            self._direction.direct(request.path, body)
            content = json.dumps(body).encode()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        url = f"http://{self._router}{request.path_qs}"
        async with (
            ClientSession() as session,
            session.request(request.method, url, data=content, headers=headers) as answer,
        ):
            passed = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response
