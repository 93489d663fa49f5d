"""A bare grpc.aio chain of the same hops and messages as a Tandem request, with no logic in it.

    client ──▶ router ──▶ decode ──▶ lender
    request    request    want
                          ◀── starting, blocks ready
                          ──▶ release, half-close
    ◀───────── ◀───────── one message per token

Every hop is a process of its own: `python -m bench.bare.chain ROLE [NEXT ADDRESS]` prints its address. The role
`workers` is decode and lender in one process, at the decode worker's address.
"""

import asyncio
import struct
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from cluster.network.rpc import Server, channel

REQUEST_BYTES = 320
WANT_BYTES = 400
STARTING_BYTES = 700
READY_BYTES = 200
RELEASE_BYTES = 6
TOKEN_BYTES = 12
LAST_BYTES = 700
NUM_TOKENS = 16
STEP_S = 0.02
"""Seconds between tokens, which all streams get at once: a new request meets running streams of a batch."""
WAITED = struct.Struct("<d")
"""Prefix of the first token's message: seconds that the request waited for a step."""


async def relay(address: str, request: bytes) -> AsyncIterator[bytes]:
    async for message in _link(address).unary_stream("/chain/Generate")(request):
        yield message


async def decode(address: str, request: bytes) -> AsyncIterator[bytes]:
    call = _link(address).stream_stream("/chain/Lend")()
    await call.write(b"w" * WANT_BYTES)
    await call.read()
    await call.read()
    await call.write(b"r" * RELEASE_BYTES)
    await call.done_writing()
    ready_at = time.monotonic()
    await ticks.next()
    yield WAITED.pack(time.monotonic() - ready_at) + b"t" * (TOKEN_BYTES - WAITED.size)
    for _ in range(NUM_TOKENS - 2):
        await ticks.next()
        yield b"t" * TOKEN_BYTES
    await ticks.next()
    yield b"l" * LAST_BYTES
    await call.read()


class Ticks:
    """Steps of a batching engine: all ready tokens leave at once, every `step_s`."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._tick: asyncio.Future[None] | None = None

    async def next(self) -> None:
        if self._tick is None:
            self._tick = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(self._step_s, self._over)
        await asyncio.shield(self._tick)

    def _over(self) -> None:
        assert self._tick is not None
        tick, self._tick = self._tick, None
        tick.set_result(None)


ticks = Ticks(STEP_S)


async def lend(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    await anext(requests)
    yield b"s" * STARTING_BYTES
    yield b"b" * READY_BYTES
    async for _ in requests:
        pass


_links: dict[str, grpc.aio.Channel] = {}


def _link(address: str) -> grpc.aio.Channel:
    if address not in _links:
        _links[address] = channel(address)
    return _links[address]


async def serve(role: str, address: str) -> str:
    """Serve the role and return its address."""
    step = {"router": relay, "decode": decode}.get(role)

    async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
        assert step is not None
        async for message in step(address, request):
            yield message

    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(generate),
        "Lend": grpc.stream_stream_rpc_method_handler(lend),
    }
    server = Server()
    server.grpc.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("chain", handlers)])
    servers.append(server)
    return f"127.0.0.1:{await server.start('127.0.0.1', 0, ['chain'])}"


servers: list[Server] = []
"""Running servers: a server ends when it is garbage collected."""


async def main(role: str, address: str) -> None:
    if role == "workers":  # both in one process
        role, address = "decode", await serve("lend", "")
    print(await serve(role, address), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the benchmark closes it


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))  # as Tandem's processes
