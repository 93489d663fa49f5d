"""One loan's stream to a lender: forwards what the lender says to the engine, and the engine's releases back."""

import asyncio
import contextlib
import logging

import grpc

from cluster.errors import from_rpc_error
from engine.messages import LoanBlocks, LoanFailed, LoanStarted
from engine.worker.engine_client import EngineClient
from protos import lend_pb2 as pb
from protos import lend_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)


class LoanStream:
    """Opened by the engine's OpenLoan, closed by its CloseLoan or by the end of the request.

    A lender that says nothing for `silence_s`, heartbeats included, is given up.
    """

    def __init__(
        self, link: grpc.aio.Channel, want: pb.Want, engine_id: str, engine: EngineClient, silence_s: float
    ) -> None:
        self._call = pb_grpc.LendStub(link).Lend()
        self._engine_id = engine_id
        self._engine = engine
        self._silence_s = silence_s
        self._closed = False
        self._task = asyncio.ensure_future(self._run(want))

    async def release(self, first: int, count: int) -> None:
        await self._write(pb.LendRequest(release=pb.Release(first=first, count=count)))

    async def close(self) -> None:
        """Half-close: the lender lets go of everything. Nothing more is forwarded to the engine."""
        self._closed = True
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def cancel(self) -> None:
        """The request is over: end the stream now."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _write(self, request: pb.LendRequest) -> None:
        """A stream that has ended takes nothing more; why it ended is told by `_run`."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(request)

    async def _run(self, want: pb.Want) -> None:
        failure = "the decode worker's side of the loan broke"
        try:
            await self._write(pb.LendRequest(want=want))
            await self._follow()
            failure = "the lender ended the stream"
        except grpc.aio.AioRpcError as error:
            failure = str(from_rpc_error(error))
        except TimeoutError:
            failure = f"the lender was silent for {self._silence_s:g} s"
        finally:
            self._call.cancel()
            if not self._closed:
                log.info("loan of %s failed: %s", self._engine_id, failure)
                self._engine.send(LoanFailed(self._engine_id, failure))

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._silence_s) as silence:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                silence.reschedule(loop.time() + self._silence_s)
                assert isinstance(response, pb.LendResponse)
                if not self._closed:
                    self._forward(response)

    def _forward(self, response: pb.LendResponse) -> None:
        match response.WhichOneof("message"):
            case "starting":
                said = response.starting
                self._engine.send(
                    LoanStarted(self._engine_id, said.endpoint, said.end_block, said.cached_end_block, said.queued_ms)
                )
            case "blocks_ready":
                ready = response.blocks_ready
                self._engine.send(LoanBlocks(self._engine_id, ready.first, tuple(ready.block_ids), ready.fingerprints))
