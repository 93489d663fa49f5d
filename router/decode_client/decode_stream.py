"""Streams to one decode worker for all its requests: a step's tokens of all requests come in one message.

A client that does not read delays no other: once PAUSE_AT messages of its request wait here, or PAUSE_BYTES, the worker
is told to keep the rest, and later sends it in fewer messages.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable

import grpc
from google.rpc import status_pb2

from cluster.errors import DeadlineExceeded, InvalidRequest, ServiceError, Unavailable
from cluster.network.error_status import from_proto, from_rpc_error
from cluster.network.rpc import MAX_MESSAGE_BYTES
from cluster.waker import Waker
from protos import decode_pb2 as pb
from protos import decode_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)
PAUSE_AT = 64
PAUSE_BYTES = 256 << 10
FRAME_BYTES = 4 << 20
"""Size after which a frame takes no more requests; the next frame takes them."""
MARGIN_BYTES = 1 << 10
"""Bytes of a frame besides its requests."""


class DecodeStream(ABC):
    """Stream to one worker.

    Any failure ends it and all its requests.
    """

    def __init__(self, name: str, on_broken: Callable[[], object]) -> None:
        """Create the stream.

        `on_broken` is called once, when the channel is not used any more.
        """
        self._name = name
        self._on_broken = on_broken
        self._requests: dict[int, _Request] = {}
        self._numbers = 0
        self._leaving = pb.RouterFrame()
        self._placed: dict[int, pb.PlacedRequest] = {}
        """Requests not sent yet, by number."""
        self._failure: ServiceError | None = None
        self.connected = False
        """Whether the connection was established."""

    @abstractmethod
    def _wake(self) -> None:
        """Have `_frame` sent soon."""

    @abstractmethod
    def _close(self) -> None:
        """Close what carries the frames."""

    @property
    def broken(self) -> bool:
        """Whether it takes no more requests."""
        return self._failure is not None

    @property
    def failure(self) -> ServiceError | None:
        """Reason why it takes no more requests."""
        return self._failure

    @property
    def idle(self) -> bool:
        return not self._requests

    async def generate(self, request: pb.DecodeRequest, timeout_s: float) -> AsyncGenerator[bytes]:
        """Yield serialised GenerateResponses.

        Raises the ServiceError that ended the request; closing early cancels it.
        """
        if request.ByteSize() > MAX_MESSAGE_BYTES - MARGIN_BYTES:
            limit = MAX_MESSAGE_BYTES - MARGIN_BYTES
            raise InvalidRequest("request", f"has {request.ByteSize()} bytes once placed; at most {limit} can be sent")
        if self._failure is not None:
            raise self._failure
        self._numbers += 1
        number = self._numbers
        waits = self._requests[number] = _Request()
        timer = asyncio.get_running_loop().call_later(timeout_s, waits.end, DeadlineExceeded(_TOO_LATE))
        self._placed[number] = pb.PlacedRequest(number=number, request=request, timeout_ms=timeout_s * 1e3)
        self._wake()
        try:
            while True:
                while waits.messages:
                    message = waits.messages.popleft()
                    waits.num_bytes -= len(message)
                    yield message
                if waits.paused:
                    waits.paused = False
                    self._leaving.resumed.append(number)
                    self._wake()
                if waits.ended:
                    if waits.failure is not None:
                        raise waits.failure
                    return
                await waits.waker.sleep()
        finally:
            timer.cancel()
            del self._requests[number]
            if self._placed.pop(number, None) is None and not waits.ended_by_worker:
                self._leaving.cancelled.append(number)
                self._wake()

    def break_off(self, failure: ServiceError) -> None:
        """Fail all requests with this error."""
        if self._failure is None:
            self._failure = failure
            for waits in self._requests.values():
                waits.end(failure)
            self._close()
            self._on_broken()

    def _receive(self, frame: pb.DecodeFrame) -> None:
        for part in frame.parts:
            self._hand_over(part)

    def _hand_over(self, part: pb.Part) -> None:
        waits = self._requests.get(part.number)
        if waits is None:
            return  # cancelled meanwhile
        waits.put(part.messages)
        if part.ended:
            failure = from_proto(status_pb2.Status.FromString(part.status)) if part.status else None
            waits.end(failure, by_worker=True)
        elif waits.is_behind and not waits.paused:
            waits.paused = True
            self._leaving.paused.append(part.number)
            self._wake()

    @property
    def _has_news(self) -> bool:
        return bool(self._placed or self._leaving.ByteSize())

    def _frame(self) -> pb.RouterFrame:
        frame, self._leaving = self._leaving, pb.RouterFrame()
        num_bytes = 0
        for number, placed in tuple(self._placed.items()):
            num_bytes += placed.ByteSize()
            if frame.placed and num_bytes > FRAME_BYTES:
                break
            frame.placed.append(self._placed.pop(number))
        return frame


class GrpcDecodeStream(DecodeStream):
    """Stream by gRPC, for workers without a port for streams."""

    def __init__(self, channel: grpc.aio.Channel, name: str, on_broken: Callable[[], object]) -> None:
        super().__init__(name, on_broken)
        self._waker = Waker()
        self._call = pb_grpc.DecodeStub(channel).Serve(self._outgoing())
        self._reading = asyncio.ensure_future(self._read())

    def _wake(self) -> None:
        self._waker.wake()

    def _close(self) -> None:
        self._call.cancel()
        self._reading.cancel()
        self._waker.wake()

    async def _read(self) -> None:
        failure: ServiceError = Unavailable(f"decode worker {self._name} ended its stream")
        try:
            async for frame in self._call:
                self._receive(frame)
        except grpc.aio.AioRpcError as error:
            failure = Unavailable(f"the stream to decode worker {self._name} broke: {from_rpc_error(error)}")
        finally:
            self.break_off(failure)

    async def _outgoing(self) -> AsyncIterator[pb.RouterFrame]:
        while self._failure is None:
            if self._has_news:
                yield self._frame()
            else:
                await self._waker.sleep()


_TOO_LATE = "the deadline passed before the request was done"


class _Request:
    """Results of one request that were not taken yet."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.num_bytes = 0
        self.paused = False
        self.ended = False
        self.ended_by_worker = False
        self.failure: ServiceError | None = None
        self.waker = Waker()

    @property
    def is_behind(self) -> bool:
        return len(self.messages) >= PAUSE_AT or self.num_bytes >= PAUSE_BYTES

    def put(self, messages: Iterable[bytes]) -> None:
        for message in messages:
            self.messages.append(message)
            self.num_bytes += len(message)
        self.waker.wake()

    def end(self, failure: ServiceError | None, by_worker: bool = False) -> None:
        if not self.ended:
            self.ended, self.ended_by_worker, self.failure = True, by_worker, failure
            self.waker.wake()
