"""Preprocessors for tests, as processes of their own, and callers of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from cluster.network.error_status import from_rpc_error
from cluster.network.rpc import channel
from preprocessor.config import PreprocessorConfig
from protos import inference_pb2, items_pb2
from protos import preprocess_pb2 as pb
from protos import preprocess_pb2_grpc as pb_grpc
from tandem.local.local_cluster import RoleProcess, start_role, stop_process

DEADLINE_S = 120.0


class Caller:
    """A router's and a worker's side of one preprocessor. Errors are typed."""

    def __init__(self, link: grpc.aio.Channel) -> None:
        self.stub = pb_grpc.PreprocessStub(link)

    @asynccontextmanager
    async def leased(self, request: pb.ProcessRequest) -> AsyncIterator[pb.ProcessReply]:
        """Yield the answer; its blobs stay within the block."""
        call = self.stub.Process(request, timeout=DEADLINE_S)
        try:
            reply = await call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        assert isinstance(reply, pb.ProcessReply), await call.code()
        try:
            yield reply
        finally:
            call.cancel()

    async def process(self, request: pb.ProcessRequest) -> pb.ProcessReply:
        async with self.leased(request) as reply:
            return reply

    async def fetch(self, items: Sequence[items_pb2.Item]) -> dict[bytes, bytes]:
        blobs: dict[bytes, bytes] = {}
        whole: set[bytes] = set()
        request = pb.FetchRequest(identifiers=[item.identifier for item in items])
        try:
            async for chunk in self.stub.Fetch(request, timeout=DEADLINE_S):
                blobs[chunk.identifier] = blobs.get(chunk.identifier, b"") + chunk.data
                if chunk.last:
                    whole.add(chunk.identifier)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        assert whole == set(blobs)
        return blobs

    async def describe(self, model: str = "") -> dict[str, pb.Modality]:
        try:
            reply = await self.stub.Describe(pb.DescribeRequest(model=model), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return {each.kind: each for each in reply.modalities}


def request_of(
    token_ids: Sequence[int], *files: bytes | str, tenant: str = "", kind: str = "image", **fields: Any
) -> pb.ProcessRequest:
    """A request with media of one kind: files, or URLs where they are texts."""
    sources = [{"url": each} if isinstance(each, str) else {"data": each} for each in files]
    media = [inference_pb2.Media(kind=kind, **source) for source in sources]
    return pb.ProcessRequest(request_id="r", prompt_token_ids=token_ids, media=media, tenant=tenant, **fields)


@asynccontextmanager
async def preprocessor(**settings: Any) -> AsyncIterator[tuple[Caller, RoleProcess]]:
    """Yield a caller of a started preprocessor, and its process."""
    config = PreprocessorConfig.parse({"engine": "sim", "port": 0, "drain_s": 0.0} | settings)
    role = await start_role("preprocessor", "preprocessor", config)
    try:
        async with channel(role.address) as link:
            yield Caller(link), role
    finally:
        await stop_process(role.process)


class _Between(pb_grpc.PreprocessServicer):
    """One that passes on what a router asks a preprocessor."""

    def __init__(self, caller: Caller, asked: list[pb.ProcessRequest], is_old: bool) -> None:
        self._caller = caller
        self._asked = asked
        self._is_old = is_old

    async def Process(  # noqa: N802
        self, request: pb.ProcessRequest, context: Any
    ) -> AsyncIterator[pb.ProcessReply]:
        self._asked.append(pb.ProcessRequest.FromString(request.SerializeToString()))
        if self._is_old:
            request.ClearField("thumbnails")
        async with self._caller.leased(request) as reply:
            yield reply
            await asyncio.Event().wait()

    async def Fetch(  # noqa: N802
        self, request: pb.FetchRequest, context: Any
    ) -> AsyncIterator[pb.FetchChunk]:
        async for chunk in self._caller.stub.Fetch(request):
            yield chunk

    async def Describe(  # noqa: N802
        self, request: pb.DescribeRequest, context: Any
    ) -> pb.DescribeReply:
        return await self._caller.stub.Describe(request)


@asynccontextmanager
async def overheard(address: str, asked: list[pb.ProcessRequest], is_old: bool = False) -> AsyncIterator[str]:
    """Yield an address that passes requests on to a preprocessor, and adds them to `asked`.

    `is_old`: pass on no field that a preprocessor of before does not know.
    """
    server = grpc.aio.server()
    async with channel(address) as link:
        pb_grpc.add_PreprocessServicer_to_server(_Between(Caller(link), asked, is_old), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)
