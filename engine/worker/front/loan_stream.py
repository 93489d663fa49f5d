"""One stream to a lender for all loans taken there, which the engine opens and closes.

The lender's messages go to the engine, the engine's releases to the lender.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import grpc
from google.rpc import status_pb2

from cluster.logs import of
from cluster.network.error_status import from_proto, from_rpc_error
from cluster.network.rpc import MAX_MESSAGE_BYTES
from cluster.waker import Waker
from engine.messages.to_engine import LenderSilent, LoanBlocks, LoanFailed, LoanStarted, ToEngine
from engine.process.front.engine_client import EngineClient
from engine.worker.front.heartbeat import Heartbeat
from protos import lend_pb2 as pb
from protos import lend_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)
FRAME_BYTES = 4 << 20
"""Size after which a frame takes no more loans; the next frame takes them."""
MARGIN_BYTES = 1 << 10
"""Bytes of a frame besides its loans."""
TOGETHER_S = 0.005
"""Seconds that a release may wait for the next loan's message, with which it costs nothing."""


class _Recipient(NamedTuple):
    """Ids of a loan for messages and logs."""

    engine_id: str
    """Id of the borrower within the engine."""
    request_id: str
    """The client's request id."""


class LoanStream:
    """Stream to one lender.

    Any failure ends the stream and all its loans.

    So does a lender that sends nothing for `silence_s`, heartbeats included, while there are loans.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        name: str,
        engine: EngineClient,
        silence_s: float,
        on_broken: Callable[[], object],
    ) -> None:
        """Create the stream.

        `on_broken` is called once, when the channel is not used any more.
        """
        self.name = name
        """Id of the lender."""
        self._engine = engine
        self._on_broken = on_broken
        self._loans: dict[int, _Recipient] = {}
        self._numbers = 0
        self._leaving: dict[int, list[pb.LoanRequest]] = {}
        """Messages not sent yet, by loan."""
        self._later: asyncio.TimerHandle | None = None
        """Timer of messages that wait for others."""
        self._due = False
        self._waker = Waker()
        self.broken = False
        """Whether the stream takes no more loans."""
        self._heartbeat = Heartbeat(
            engine,
            silence_s,
            self._send_heartbeat,
            lambda: self.break_off(f"the lender was silent for {silence_s:g} s"),
            self._tell_silent,
        )
        self._call = pb_grpc.LendStub(channel).Lend(self._outgoing())
        self._reading = asyncio.ensure_future(self._read())

    @property
    def num_loans(self) -> int:
        return len(self._loans)

    def open(self, engine_id: str, want: pb.Want) -> "LoanCall":
        """Open a loan.

        The engine is told its progress, also when the lender cannot be reached.
        """
        self._numbers += 1
        loan, recipient = LoanCall(self, self._numbers), _Recipient(engine_id, want.request_id)
        if want.ByteSize() > MAX_MESSAGE_BYTES - MARGIN_BYTES:
            self._tell_failed(recipient, f"{want.ByteSize()} bytes of tokens are more than a message takes")
        elif self.broken:
            self._tell_failed(recipient, "the stream to the lender is broken")
        else:
            if not self._loans:
                self._heartbeat.start()
            self._loans[loan.number] = recipient
            self.send(pb.LoanRequest(number=loan.number, want=want))
        return loan

    def send(self, request: pb.LoanRequest) -> None:
        """Send a message of a loan; nothing is sent for a loan that is over."""
        if request.number in self._loans:
            if request.HasField("want"):
                self._hurry()
            elif not self._leaving and self._later is None:
                self._later = asyncio.get_running_loop().call_later(TOGETHER_S, self._hurry)
            self._leaving.setdefault(request.number, []).append(request)

    def close(self, number: int) -> None:
        """Close a loan: the lender releases all its blocks, and the engine hears nothing more of it.

        May be called again.
        """
        if number in self._loans:
            unsaid = self._leaving.pop(number, None)
            if unsaid is None or not unsaid[0].HasField("want"):  # otherwise the lender has never received this loan
                self.send(pb.LoanRequest(number=number, close=pb.Close()))
            self._forget(number)

    def break_off(self, failure: str) -> None:
        """Fail all loans with this reason."""
        if self.broken:
            return
        self.broken = True
        for recipient in self._loans.values():
            self._tell_failed(recipient, failure)
        if self._loans:
            self._heartbeat.stop()
        self._loans.clear()
        self._leaving.clear()
        self._call.cancel()
        self._reading.cancel()
        self._hurry()
        self._on_broken()

    def _forget(self, number: int) -> "_Recipient":
        recipient = self._loans.pop(number)
        if not self._loans:
            self._heartbeat.stop()
        return recipient

    def _tell_failed(self, recipient: "_Recipient", failure: str) -> None:
        log.info(
            "loan of %s from %s failed: %s", recipient.engine_id, self.name, failure, extra=of(recipient.request_id)
        )
        self._engine.send(LoanFailed(recipient.engine_id, failure))

    def _tell_silent(self, seconds: float) -> None:
        self._engine.send(*(LenderSilent(recipient.engine_id, seconds) for recipient in self._loans.values()))

    def _send_heartbeat(self) -> None:
        self._due = True
        self._waker.wake()

    def _hurry(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._waker.wake()

    async def _outgoing(self) -> AsyncIterator[pb.BorrowerFrame]:
        while not self.broken:
            if self._due or (self._leaving and self._later is None):
                yield self._frame()
            else:
                await self._waker.sleep()

    def _frame(self) -> pb.BorrowerFrame:
        """Return the next frame; messages that do not fit follow in the next one."""
        self._due = False
        requests: list[pb.LoanRequest] = []
        num_bytes = 0
        for number, queued in tuple(self._leaving.items()):
            num_bytes += sum(request.ByteSize() for request in queued)
            if requests and num_bytes > FRAME_BYTES:
                self._hurry()
                break
            requests += self._leaving.pop(number)
        return pb.BorrowerFrame(requests=requests, engine_turned=self._heartbeat.take())

    async def _read(self) -> None:
        failure = "the borrower's side of the loan broke"
        try:
            async for frame in self._call:
                self._absorb(frame)
            failure = "the lender ended the stream"
        except grpc.aio.AioRpcError as error:
            failure = str(from_rpc_error(error))
        finally:
            self.break_off(failure)

    def _absorb(self, frame: pb.LenderFrame) -> None:
        if frame.engine_turned:
            self._heartbeat.record_received()
        messages: list[ToEngine] = []
        for response in frame.responses:
            if (loan := self._loans.get(response.number)) is None:
                continue  # closed meanwhile
            engine_id = loan.engine_id
            match response.WhichOneof("message"):
                case "starting":
                    starting = response.starting
                    messages.append(
                        LoanStarted(
                            engine_id,
                            starting.endpoint,
                            starting.end_block,
                            starting.cached_end_block,
                            starting.queued_ms,
                        )
                    )
                case "blocks_ready":
                    ready = response.blocks_ready
                    block_ids = tuple(ready.block_ids)
                    messages.append(LoanBlocks(engine_id, ready.first, block_ids, ready.fingerprints, ready.fetched))
                case "refused":
                    refusal = from_proto(status_pb2.Status.FromString(response.refused))
                    self._leaving.pop(response.number, None)
                    self._tell_failed(self._forget(response.number), str(refusal))
        if messages:
            self._engine.send(*messages)


class LoanCall:
    """One loan of the stream."""

    __slots__ = ("_link", "number")

    def __init__(self, link: LoanStream, number: int) -> None:
        self._link = link
        self.number = number

    def release(self, first: int, count: int) -> None:
        """Release blocks that have been read."""
        self._link.send(pb.LoanRequest(number=self.number, release=pb.Release(first=first, count=count)))

    def close(self) -> None:
        """Close the loan."""
        self._link.close(self.number)
