"""All loans of one borrower on this worker, over one stream; news of all loans leaves in one message."""

import logging
from collections.abc import AsyncIterator, Callable

from cluster.errors import InvalidRequest, ServiceError, Unavailable
from cluster.logs import of
from cluster.network.error_status import to_proto
from cluster.waker import Waker
from engine.process.front.engine_client import EngineClient
from engine.worker.front.heartbeat import Heartbeat
from prefill_worker.loan import LendCall
from protos import lend_pb2 as pb

log = logging.getLogger(__name__)
MAX_FRAME_BYTES = 1 << 20
"""Size after which a frame takes nothing more; the next frame does."""

Begin = Callable[[pb.Want, Callable[[], object]], LendCall]
"""Factory of loans. Raises ServiceError."""


class BorrowerStream:
    """Lender's end of a stream: `absorb` takes the borrower's frames, `frames` yields the lender's.

    A borrower that has loans and sends nothing for `silence_s` is given up.
    """

    def __init__(self, begin: Begin, engine: EngineClient, silence_s: float) -> None:
        self._begin = begin
        self._loans: dict[int, LendCall] = {}
        self._changed: dict[int, ServiceError | None] = {}
        """Loans with pending messages, oldest first, with the error of those that were refused."""
        self._highest = 0
        self._due = False
        self._ended = False
        self.failure: ServiceError | None = None
        """Reason for the end, when the borrower did not end the stream."""
        self._waker = Waker()
        silent = Unavailable(f"the borrower was silent for {silence_s:g} s")
        self._heartbeat = Heartbeat(engine, silence_s, self._send_heartbeat, lambda: self._fall_silent(silent))

    @property
    def num_loans(self) -> int:
        return len(self._loans)

    def absorb(self, frame: pb.BorrowerFrame) -> None:
        """Process a frame.

        Raises InvalidRequest for a malformed one; the stream is unusable afterwards.
        """
        if frame.engine_turned:
            self._heartbeat.record_received()
        for request in frame.requests:
            match request.WhichOneof("message"):
                case "want":
                    self._open(request.number, request.want)
                case "release":
                    if (loan := self._loans.get(request.number)) is not None:  # otherwise the loan is already over
                        loan.release(request.release.first, request.release.count)
                case "close":
                    self._changed.pop(request.number, None)
                    self._forget(request.number)
                case _:
                    raise InvalidRequest("message", f"the message for loan {request.number} is empty")

    async def frames(self) -> AsyncIterator[pb.LenderFrame]:
        """Yield frames until `end`."""
        while True:
            while not (self._changed or self._due or self._ended):
                await self._waker.sleep()
            if self._ended:
                return
            yield self._frame()

    def end(self, failure: ServiceError | None = None) -> None:
        """End the stream and all its loans at once, without waiting for messages in flight.

        May be called again.
        """
        self._ended = True
        self.failure = self.failure or failure
        self._changed.clear()
        for number in tuple(self._loans):
            self._forget(number)
        self._waker.wake()

    def _open(self, number: int, want: pb.Want) -> None:
        if number <= self._highest:
            raise InvalidRequest("number", f"must increase: loan {number} came after loan {self._highest}")
        self._highest = number
        try:
            loan = self._begin(want, lambda: self._has_changed(number))
        except ServiceError as refusal:
            self._refuse(number, refusal)
        except Exception as error:  # a bug here ends this loan only, not the whole stream
            log.exception("a loan failed", extra=of(want.request_id))
            self._refuse(number, ServiceError(f"the lender failed: {error!r}"))
        else:
            if not self._loans:
                self._heartbeat.start()
            self._loans[number] = loan

    def _refuse(self, number: int, refusal: ServiceError) -> None:
        self._changed[number] = refusal
        self._waker.wake()

    def _has_changed(self, number: int) -> None:
        self._changed[number] = None
        self._waker.wake()

    def _send_heartbeat(self) -> None:
        self._due = True
        self._waker.wake()

    def _fall_silent(self, failure: ServiceError) -> None:
        log.info("%s; %d loans were open", failure, len(self._loans))
        self.end(failure)

    def _forget(self, number: int) -> None:
        if (loan := self._loans.pop(number, None)) is not None:
            loan.close()
            if not self._loans:
                self._heartbeat.stop()

    def _frame(self) -> pb.LenderFrame:
        self._due = False
        frame = pb.LenderFrame(engine_turned=self._heartbeat.take())
        num_bytes = 0
        while self._changed and num_bytes < MAX_FRAME_BYTES:
            number = next(iter(self._changed))
            refusal = self._changed.pop(number)
            if (loan := self._loans.get(number)) is not None:
                while num_bytes < MAX_FRAME_BYTES and (response := loan.take()) is not None:
                    response.number = number
                    num_bytes += response.ByteSize()
                    frame.responses.append(response)
                if num_bytes >= MAX_FRAME_BYTES:  # the loan may have more
                    self._changed[number] = None
                    break
                refusal = loan.failure
            if refusal is not None:
                frame.responses.add(number=number, refused=to_proto(refusal).SerializeToString())
                self._forget(number)
        return frame
