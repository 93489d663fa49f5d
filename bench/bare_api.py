"""Reference for `bench.api`: a source of streams, and proxies that pass bytes on without any logic.

`python -m bench.bare_api ROLE STEP_S NUM_TOKENS [SOURCE]` prints its address. Roles: grpc-source and http-source;
grpc-proxy and http-proxy, each in front of a source of its own kind; http-to-grpc-proxy, with the hops of Tandem's HTTP
frontend. Messages are as long as Tandem's. A stream's first message tells how long its request waited for a step.
"""

import asyncio
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import grpc
import uvicorn
import uvloop

from bench.chain import Ticks
from cluster.rpc import Server, channel

METHOD = "/bare/Generate"
WAITED = struct.Struct("<d")
TOKEN, LAST = b"t" * 12, b"l" * 600
EVENT = b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1790000000,"model":"sim","choices":'
EVENT += b'[{"index":0,"text":"","logprobs":null,"finish_reason":null}]}\n\n'
HEAD = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class Source:
    """Source of tokens: all streams' at once every `step_s`, or without a step as fast as they are taken."""

    def __init__(self, step_s: float, num_tokens: int) -> None:
        self._ticks = Ticks(step_s)
        self._step_s = step_s
        self._num_tokens = num_tokens

    async def waits(self) -> AsyncIterator[float]:
        """Yield for each token how long it waited, in seconds."""
        for _ in range(self._num_tokens):
            began_at = time.monotonic()
            if self._step_s:
                await self._ticks.next()
            yield time.monotonic() - began_at


async def serve_grpc(source: Source | None, upstream: str) -> str:
    link = channel(upstream) if upstream else None

    async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
        if source is not None:
            first = True
            async for waited in source.waits():
                yield WAITED.pack(waited) + TOKEN[WAITED.size :] if first else TOKEN
                first = False
            yield LAST
        else:
            assert link is not None
            async for message in link.unary_stream(METHOD)(request):
                yield message

    handler = grpc.unary_stream_rpc_method_handler(generate)
    server = Server()
    servers.append(server)
    server.grpc.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bare", {"Generate": handler})])
    return f"127.0.0.1:{await server.start('127.0.0.1', 0, ['bare'])}"


servers: list[Any] = []
"""Running servers: a server ends when it is garbage collected."""


async def events_of(source: Source) -> AsyncIterator[bytes]:
    first = True
    async for waited in source.waits():
        yield b": %.6f\n" % waited + EVENT if first else EVENT
        first = False


async def events_by_http(session: aiohttp.ClientSession, upstream: str) -> AsyncIterator[bytes]:
    """Yield the source's bytes, however many arrive at a time."""
    async with session.post(f"http://{upstream}/", data=b"r") as answer:
        async for part in answer.content.iter_any():
            yield part


async def events_by_grpc(link: Any) -> AsyncIterator[bytes]:
    first = True
    async for message in link.unary_stream(METHOD)(b"q" * 80):
        if len(message) == len(TOKEN):
            yield b": %.6f\n" % WAITED.unpack_from(message) + EVENT if first else EVENT
        first = False


async def serve_http(events: Callable[[], AsyncIterator[bytes]]) -> str:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": HEAD})
        async for event in events():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    options: dict[str, Any] = {"log_config": None, "log_level": "error", "access_log": False, "lifespan": "off"}
    listening = socket.create_server(("127.0.0.1", 0), backlog=8192)
    server = uvicorn.Server(uvicorn.Config(app, ws="none", **options))
    servers.append(asyncio.ensure_future(server.serve([listening])))
    return f"127.0.0.1:{listening.getsockname()[1]}"


async def serve(role: str, source: Source, upstream: str) -> str:
    """Serve the role and return its address."""
    match role:
        case "grpc-source":
            return await serve_grpc(source, "")
        case "grpc-proxy":
            return await serve_grpc(None, upstream)
        case "http-source":
            return await serve_http(lambda: events_of(source))
        case "http-proxy":
            session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600))
            return await serve_http(lambda: events_by_http(session, upstream))
        case "http-to-grpc-proxy":
            link = channel(upstream)
            return await serve_http(lambda: events_by_grpc(link))
    raise ValueError(role)


async def main(role: str, step_s: float, num_tokens: int, upstream: str) -> None:
    print(await serve(role, Source(step_s, num_tokens), upstream), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the benchmark closes it


if __name__ == "__main__":
    role, step, tokens, *rest = sys.argv[1:]
    uvloop.run(main(role, float(step), int(tokens), rest[0] if rest else ""))
