"""Reference for `streams.py`: a source of streams, and a grpc.aio proxy that passes bytes on.

`python -m bench.router.bare_streams ROLE [SOURCE ADDRESS]` prints its address.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from bench.bare.chain import Ticks
from cluster.network.rpc import Server, channel

METHOD = "/bare/Generate"
TOKEN = b"t" * 12
REQUEST = b"r" * 64
STEP_S = 1.0
NUM_TOKENS = 45


async def main(role: str, address: str) -> None:
    steps, server = Ticks(STEP_S), Server()
    upstream: grpc.aio.Channel | None = channel(address) if role == "proxy" else None

    async def source(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(NUM_TOKENS):
            await steps.next()
            yield TOKEN

    async def proxy(request: bytes, context: Any) -> AsyncIterator[bytes]:
        assert upstream is not None
        async for message in upstream.unary_stream(METHOD)(request):
            yield message

    handler = grpc.unary_stream_rpc_method_handler(proxy if role == "proxy" else source)
    server.grpc.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bare", {"Generate": handler})])
    print(f"127.0.0.1:{await server.start('127.0.0.1', 0, ['bare'])}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the benchmark closes it


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
