"""One stream to a lender for all loans that this worker takes there, opened and closed as the engine says.

What the lender says goes to the engine, and the engine's releases go back.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import grpc
from google.rpc import status_pb2

from cluster.error_status import from_proto, from_rpc_error
from cluster.logs import of
from cluster.rpc import MAX_MESSAGE_BYTES
from cluster.waker import Waker
from engine.messages import LoanBlocks, LoanFailed, LoanStarted, ToEngine
from engine.process.engine_client import EngineClient
from engine.worker.heartbeat import Heartbeat
from protos import lend_pb2 as pb
from protos import lend_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)
FRAME_BYTES = 4 << 20
"""A frame takes no more loans beyond this; the next one takes them."""
MARGIN_BYTES = 1 << 10
"""What a frame has beside a loan."""
TOGETHER_S = 0.005
"""At most so long does a lender wait to hear what it may have back: with the next loan's want it costs nothing."""


class _Told(NamedTuple):
    """Who is told how a loan goes."""

    engine_id: str
    """The engine's name of who borrows."""
    request_id: str
    """The client's."""


class LoanStream:
    """Gone with whatever breaks it: then all its loans fail. So does a lender that says nothing for `silence_s`,
    heartbeats included, while there are any."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        name: str,
        engine: EngineClient,
        silence_s: float,
        on_broken: Callable[[], object],
    ) -> None:
        """`on_broken` is called once: the channel is not used any more."""
        self._name = name
        self._engine = engine
        self._on_broken = on_broken
        self._loans: dict[int, _Told] = {}
        self._numbers = 0
        self._leaving: dict[int, list[pb.LoanRequest]] = {}
        """Not sent yet, by loan."""
        self._later: asyncio.TimerHandle | None = None
        """While what is to leave waits for what else there may be."""
        self._due = False
        self._waker = Waker()
        self.broken = False
        """It takes no more loans."""
        self._heartbeat = Heartbeat(
            engine,
            silence_s,
            self._send_heartbeat,
            lambda: self.break_off(f"the lender was silent for {silence_s:g} s"),
        )
        self._call = pb_grpc.LendStub(channel).Lend(self._outgoing())
        self._reading = asyncio.ensure_future(self._read())

    @property
    def num_loans(self) -> int:
        return len(self._loans)

    def open(self, engine_id: str, want: pb.Want) -> "Loan":
        """How it goes the engine is told, also when it cannot even be asked for."""
        self._numbers += 1
        loan, told = Loan(self, self._numbers), _Told(engine_id, want.request_id)
        if want.ByteSize() > MAX_MESSAGE_BYTES - MARGIN_BYTES:
            self._tell_failed(told, f"{want.ByteSize()} bytes of tokens are more than a message takes")
        elif self.broken:
            self._tell_failed(told, "the stream to the lender is broken")
        else:
            if not self._loans:
                self._heartbeat.start()
            self._loans[loan.number] = told
            self.say(pb.LoanRequest(number=loan.number, want=want))
        return loan

    def say(self, request: pb.LoanRequest) -> None:
        """Of a loan that is over, silently nowhere."""
        if request.number in self._loans:
            if request.HasField("want"):
                self._hurry()
            elif not self._leaving and self._later is None:
                self._later = asyncio.get_running_loop().call_later(TOGETHER_S, self._hurry)
            self._leaving.setdefault(request.number, []).append(request)

    def close(self, number: int) -> None:
        """The lender lets go of everything; nothing more is forwarded to the engine. May be called again."""
        if number in self._loans:
            unsaid = self._leaving.pop(number, None)
            if unsaid is None or not unsaid[0].HasField("want"):  # else the lender has never heard of it
                self.say(pb.LoanRequest(number=number, close=pb.Close()))
            self._forget(number)

    def break_off(self, failure: str) -> None:
        """All its loans fail with this."""
        if self.broken:
            return
        self.broken = True
        for told in self._loans.values():
            self._tell_failed(told, failure)
        if self._loans:
            self._heartbeat.stop()
        self._loans.clear()
        self._leaving.clear()
        self._call.cancel()
        self._reading.cancel()
        self._hurry()
        self._on_broken()

    def _forget(self, number: int) -> "_Told":
        told = self._loans.pop(number)
        if not self._loans:
            self._heartbeat.stop()
        return told

    def _tell_failed(self, told: "_Told", failure: str) -> None:
        log.info("loan of %s from %s failed: %s", told.engine_id, self._name, failure, extra=of(told.request_id))
        self._engine.send(LoanFailed(told.engine_id, failure))

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
        """What does not fit follows at once."""
        self._due = False
        requests: list[pb.LoanRequest] = []
        num_bytes = 0
        for number, said in tuple(self._leaving.items()):
            num_bytes += sum(request.ByteSize() for request in said)
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
            self._heartbeat.heard()
        told: list[ToEngine] = []
        for response in frame.responses:
            if (loan := self._loans.get(response.number)) is None:
                continue  # closed meanwhile
            engine_id = loan.engine_id
            match response.WhichOneof("message"):
                case "starting":
                    said = response.starting
                    told.append(
                        LoanStarted(engine_id, said.endpoint, said.end_block, said.cached_end_block, said.queued_ms)
                    )
                case "blocks_ready":
                    ready = response.blocks_ready
                    block_ids = tuple(ready.block_ids)
                    told.append(LoanBlocks(engine_id, ready.first, block_ids, ready.fingerprints, ready.fetched))
                case "refused":
                    refusal = from_proto(status_pb2.Status.FromString(response.refused))
                    self._leaving.pop(response.number, None)
                    self._tell_failed(self._forget(response.number), str(refusal))
        if told:
            self._engine.send(*told)


class Loan:
    """One of a link's."""

    __slots__ = ("_link", "number")

    def __init__(self, link: LoanStream, number: int) -> None:
        self._link = link
        self.number = number

    def release(self, first: int, count: int) -> None:
        """Those blocks have been read."""
        self._link.say(pb.LoanRequest(number=self.number, release=pb.Release(first=first, count=count)))

    def close(self) -> None:
        """Nothing more is wanted of it."""
        self._link.close(self.number)
