"""All requests of one router on this worker, over one stream.

News of all requests leaves in one message. A router that reads slowly gets fewer, larger messages, because tokens are
collected until a message can be sent.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from cluster.errors import DeadlineExceeded, InvalidRequest, ServiceError
from cluster.logs import of
from cluster.network.error_status import to_proto
from cluster.network.frame_stream import FrameStream
from cluster.network.protocol import DECODE_FRAMES
from cluster.waker import Waker
from decode_worker.decode_attempt import DecodeAttempt
from protos import decode_pb2 as pb

log = logging.getLogger(__name__)
MAX_FRAME_BYTES = 1 << 20
"""Size after which a frame takes no more requests; the next frame takes them."""
MAX_PART_BYTES = 64 << 10
"""Size after which one request's part of a frame ends. The rest follows the other requests, in case the router paused
it."""

Begin = Callable[[pb.DecodeRequest, Callable[[], object]], DecodeAttempt]
"""Factory of attempts. Raises ServiceError."""


class _ActiveRequest:
    """A request that the router placed here, by its number on the stream."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.attempt: DecodeAttempt | None = None
        self.refusal: ServiceError | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.paused = False

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.attempt is not None:
            self.attempt.close()
            self.attempt = None  # its callback refers to this object: a reference cycle otherwise


class RouterStream:
    """Worker's end of a stream: `absorb` takes the router's frames, `frames` yields the worker's."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._served: dict[int, _ActiveRequest] = {}
        self._changed: dict[int, _ActiveRequest] = {}
        """Requests with pending messages that are not paused, oldest pending first."""
        self._highest = -1
        self._ended = False
        self._waker = Waker()

    @property
    def num_requests(self) -> int:
        """Number of requests that are not over."""
        return len(self._served)

    def absorb(self, frame: pb.RouterFrame) -> None:
        """Process a frame.

        Raises InvalidRequest for a malformed one; the stream is unusable afterwards.
        """
        for placed in frame.placed:
            self._place(placed)
        for number in frame.cancelled:
            if (served := self._served.pop(number, None)) is not None:  # otherwise the request is already over
                self._changed.pop(number, None)
                served.close()
        for number in frame.paused:
            if (served := self._served.get(number)) is not None:
                served.paused = True
                self._changed.pop(number, None)
        for number in frame.resumed:
            if (served := self._served.get(number)) is not None:
                served.paused = False
                self._has_changed(served)

    async def frames(self) -> AsyncIterator[pb.DecodeFrame]:
        """Yield frames until `end`."""
        while True:
            while not self._changed and not self._ended:
                await self._waker.sleep()
            if self._ended:
                return
            yield self._frame()

    def end(self) -> None:
        """End `frames`: the router sends nothing more and receives nothing more."""
        self._ended = True
        self._waker.wake()

    def close(self) -> None:
        """Cancel all requests."""
        for served in self._served.values():
            served.close()
        self._served.clear()
        self._changed.clear()

    def _place(self, placed: pb.PlacedRequest) -> None:
        if placed.number <= self._highest:
            raise InvalidRequest("placed.number", f"must increase: {placed.number} came after {self._highest}")
        self._highest = placed.number
        served = self._served[placed.number] = _ActiveRequest(placed.number)
        try:
            served.attempt = self._begin(placed.request, lambda: self._has_changed(served))
        except ServiceError as refusal:
            served.refusal = refusal
        except Exception as error:  # a bug here ends this request only, not the whole stream
            log.exception("a request failed", extra=of(placed.request.request_id))
            served.refusal = ServiceError(f"the decode worker failed: {error!r}")
        if served.attempt is None:
            self._has_changed(served)
            return
        if placed.timeout_ms > 0:
            failure = DeadlineExceeded("the deadline passed before the request was done")
            served.timer = asyncio.get_running_loop().call_later(placed.timeout_ms / 1e3, served.attempt.fail, failure)

    def _has_changed(self, served: _ActiveRequest) -> None:
        if served.paused or served.number not in self._served:
            return
        self._changed[served.number] = served
        self._waker.wake()

    def _frame(self) -> pb.DecodeFrame:
        frame = pb.DecodeFrame()
        num_bytes = 0
        while self._changed and num_bytes < MAX_FRAME_BYTES:
            served = self._changed.pop(next(iter(self._changed)))
            part = frame.parts.add(number=served.number)
            failure = served.refusal
            if served.attempt is not None:
                if _take_some(served.attempt, part):
                    part.ended, failure = served.attempt.over, served.attempt.failure
                else:
                    self._changed[served.number] = served
            if failure is not None:
                part.ended, part.status = True, to_proto(failure).SerializeToString()
            if part.ended:
                del self._served[served.number]
                served.close()
            elif not part.messages:
                frame.parts.pop()
                continue
            num_bytes += part.ByteSize()
        return frame


def serve_router(
    connection: RouterStream, stream: FrameStream, hold: Callable[[], Awaitable[None]]
) -> Callable[[bytes], None]:
    """Serve a router on a stream over bare TCP; return the function that takes the router's frames.

    `hold` is awaited before each frame to the router.
    """

    async def send() -> None:
        async for frame in connection.frames():
            await hold()
            stream.send(DECODE_FRAMES, frame.SerializeToString())
            await stream.drained()

    sending = asyncio.ensure_future(send())

    def ended(_: ServiceError) -> None:
        connection.close()
        sending.cancel()

    stream.on_end.append(ended)
    return lambda payload: connection.absorb(pb.RouterFrame.FromString(payload))


def _take_some(attempt: DecodeAttempt, part: pb.Part) -> bool:
    """Move messages into `part` up to its size limit; return whether none is left."""
    num_bytes = 0
    for response in attempt.take():
        raw = response.SerializeToString()
        part.messages.append(raw)
        num_bytes += len(raw)
        if num_bytes >= MAX_PART_BYTES:
            return False
    return True
