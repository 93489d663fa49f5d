"""The Lend service, which workers of both roles run."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

from cluster.errors import ServiceError
from cluster.network.error_status import to_status
from cluster.network.rpc import absorb_all
from engine.worker.runtime import WorkerContext
from prefill_worker.borrower_stream import BorrowerStream
from prefill_worker.loan import LendCall
from protos import lend_pb2 as pb
from protos import lend_pb2_grpc as pb_grpc


class LendService(pb_grpc.LendServicer):
    """gRPC service of a lender.

    The stream is the lease: its end releases all loans on it.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._numbers = itertools.count(1)

    async def Lend(
        self, request_iterator: AsyncIterator[pb.BorrowerFrame], context: Any
    ) -> AsyncIterator[pb.LenderFrame]:
        connection = BorrowerStream(self._begin, self._context.engine, self._context.config.peer_silence_s)
        reading = asyncio.ensure_future(absorb_all(request_iterator, connection.absorb))
        reading.add_done_callback(lambda _: connection.end())
        try:
            async for frame in connection.frames():
                await self._context.faults.hold_frame()
                yield frame
            if connection.failure is not None:
                raise connection.failure
            await reading
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
        finally:
            reading.cancel()
            connection.end()

    async def Meet(self, request: pb.MeetRequest, context: Any) -> pb.MeetReply:
        try:
            return await self._context.introductions.answer(request)
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
            raise

    def _begin(self, want: pb.Want, on_news: Callable[[], object]) -> LendCall:
        return LendCall(self._context, f"loan-{next(self._numbers)}", want, on_news)


def add_lend_service(server: Any, context: WorkerContext) -> list[str]:
    """Register the Lend service; workers of both roles lend."""
    pb_grpc.add_LendServicer_to_server(LendService(context), server.grpc)
    return ["tandem.internal.v1.Lend"]
