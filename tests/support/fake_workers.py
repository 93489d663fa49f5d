"""A decode worker that a test speaks for: it joins a router, reports room again and again, and serves as it is told."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from cluster.network.mux import Channel
from cluster.network.mux_stream import MuxServer, MuxStream
from cluster.network.rpc import PROTOCOL, channel
from engine.model.model_dir import ModelDir
from protos import decode_pb2, membership_pb2, membership_pb2_grpc

REPORT_S = 0.02
Serve = Callable[[MuxStream, Channel, decode_pb2.DecodeRequest], object]


@asynccontextmanager
async def fake_worker(router: str, model: ModelDir, serve: Serve, **hello: Any) -> AsyncIterator[None]:
    """Join the router at an address; `serve` gets each request."""

    def accept(stream: MuxStream, opening: bytes) -> None:
        stream.on_channel = lambda opened, request: serve(stream, opened, decode_pb2.DecodeRequest.FromString(request))
        reporting = asyncio.ensure_future(report(stream))
        stream.on_end.append(lambda _: reporting.cancel())

    async def report(stream: MuxStream) -> None:
        load = membership_pb2.LoadReport(available_blocks=100, num_blocks=100)
        while True:
            stream.mux.note(membership_pb2.WorkerMessage(load=load).SerializeToString())
            await asyncio.sleep(REPORT_S)

    async def said(address: str) -> AsyncIterator[membership_pb2.WorkerMessage]:
        fields: dict[str, Any] = {
            "worker_id": "fake",
            "incarnation": b"1",
            "model": model.name,
            "model_fingerprint": b"model",
            "block_tokens": 16,
            "num_blocks": 100,
            "block_bytes": 1024,
            "max_context_tokens": 1000,
        }
        yield membership_pb2.WorkerMessage(
            hello=membership_pb2.Hello(
                protocol=PROTOCOL,
                role=membership_pb2.ROLE_DECODE,
                address=address,
                stream_address=address,
                config_fingerprint=model.config_fingerprint(),
                **(fields | hello),
            )
        )
        await asyncio.Event().wait()

    async def stay_joined(address: str) -> None:
        async with channel(router) as link:
            async for _ in membership_pb2_grpc.MembershipStub(link).Join(said(address)):
                pass

    server = MuxServer(accept)
    joined = asyncio.ensure_future(stay_joined(f"127.0.0.1:{await server.start('127.0.0.1', 0, 'port')}"))
    try:
        yield
    finally:
        joined.cancel()
        await asyncio.wait([joined])
        server.close()
