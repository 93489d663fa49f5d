"""The Decode service: runs placed requests on the engine, with loans from the lenders that the router chose."""

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

from tokenizers import Tokenizer

from cluster.errors import ServiceError
from cluster.network.error_status import to_status
from cluster.network.frame_stream import FrameStream
from cluster.network.rpc import absorb_all
from decode_worker.decode_attempt import DecodeAttempt
from decode_worker.router_stream import RouterStream, serve_router
from engine.model.detokenizer import load_tokenizer
from engine.worker.runtime import WorkerContext
from protos import decode_pb2 as pb
from protos import decode_pb2_grpc as pb_grpc
from protos import inference_pb2 as public_pb


class DecodeService(pb_grpc.DecodeServicer):
    """gRPC service of a decode worker.

    A request ends with its stream and leaves only cached blocks.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._numbers = itertools.count(1)
        if context.roles.role == "decode":
            self._tokenizer  # noqa: B018 # load it at start, not with the first request
        else:
            context.roles.before_decode.append(lambda: self._tokenizer)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(self._context.model_dir)

    async def Serve(
        self, request_iterator: AsyncIterator[pb.RouterFrame], context: Any
    ) -> AsyncIterator[pb.DecodeFrame]:
        connection = RouterStream(self._begin)
        reading = asyncio.ensure_future(absorb_all(request_iterator, connection.absorb))
        reading.add_done_callback(lambda _: connection.end())
        try:
            async for frame in connection.frames():
                await self._context.faults.hold_frame()
                yield frame
            await reading
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
        finally:
            reading.cancel()
            connection.close()

    def serve_frames(self, stream: FrameStream) -> Callable[[bytes], None]:
        """Serve a router's requests on a stream over bare TCP; return the function that takes its frames."""
        return serve_router(RouterStream(self._begin), stream, self._context.faults.hold_frame)

    async def Generate(self, request: pb.DecodeRequest, context: Any) -> AsyncIterator[public_pb.GenerateResponse]:
        news = asyncio.Event()
        attempt: DecodeAttempt | None = None
        try:
            attempt = self._begin(request, news.set)
            while not attempt.over:
                await news.wait()
                news.clear()
                for response in attempt.take():
                    yield response
            if attempt.failure is not None:
                raise attempt.failure
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
        finally:
            if attempt is not None:
                attempt.close()

    def _begin(self, request: pb.DecodeRequest, on_news: Callable[[], object]) -> DecodeAttempt:
        engine_id = f"request-{next(self._numbers)}"  # not the client's id, which may not be unique
        tokenizer = None if request.HasField("embedding") else self._tokenizer  # an embedding has no text
        return DecodeAttempt(self._context, tokenizer, engine_id, request, on_news)


def add_decode_service(server: Any, context: WorkerContext) -> list[str]:
    service = DecodeService(context)
    pb_grpc.add_DecodeServicer_to_server(service, server.grpc)
    context.streams.serve = service.serve_frames
    return ["tandem.internal.v1.Decode"]
