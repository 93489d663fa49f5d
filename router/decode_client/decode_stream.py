"""Connection to one worker for all its requests, which also brings the worker's events.

A step's tokens of all requests come in one frame. A client that does not read delays no other: once PAUSE_AT messages
of its request wait here, or PAUSE_BYTES, the worker is told to keep the rest, and later sends it in fewer messages.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from cluster.errors import DeadlineExceeded, InvalidRequest, ServiceError, Unavailable
from cluster.fair_turns import Waker
from cluster.network.error_status import from_proto
from cluster.network.mux import MAX_MESSAGE_BYTES, Channel
from cluster.network.mux_stream import MuxStream
from cluster.network.tls import MemberIdentity
from cluster.process.tasks import Tasks
from protos import decode_pb2 as pb
from protos import membership_pb2

CONNECT_S = 3.0
"""Seconds for a connection, while the request could run elsewhere."""
PAUSE_AT = 64
PAUSE_BYTES = 256 << 10

Connect = Callable[[MuxStream, str, MemberIdentity | None], Awaitable[None]]
OnEvent = Callable[[membership_pb2.WorkerMessage], object]


class DecodeStream:
    """Connection to one worker.

    Any failure ends it and all its requests.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        name: str,
        on_broken: Callable[[], object],
        on_event: OnEvent,
        trust: MemberIdentity | None,
        connects: Connect = MuxStream.connect,
    ) -> None:
        """Connect; `key` is that of the membership whose events the connection brings.

        `on_broken` is called once, when it takes no more requests.
        """
        self._name = name
        self._on_broken = on_broken
        self.failure: ServiceError | None = None
        """Reason why it takes no more requests."""
        self.stream = MuxStream(membership_pb2.StreamOpening(key=key).SerializeToString())
        self.stream.mux.on_note = lambda note: on_event(membership_pb2.WorkerMessage.FromString(note))
        self.stream.on_end.append(self._ended)
        self._tasks = Tasks("a connection to a worker was lost")
        self._tasks.spawn(self._connect(connects(self.stream, address, trust), address))

    @property
    def connected(self) -> bool:
        """Whether the connection was established."""
        return self.stream.is_connected

    @property
    def broken(self) -> bool:
        """Whether it takes no more requests."""
        return self.failure is not None

    @property
    def idle(self) -> bool:
        return not self.stream.mux.num_channels

    async def generate(self, request: pb.DecodeRequest, timeout_s: float) -> AsyncGenerator[Sequence[bytes]]:
        """Yield serialised GenerateResponses, all that have come since the last.

        Raises the ServiceError that ended the request; closing early cancels it.
        """
        request.timeout_ms = timeout_s * 1e3
        opening = request.SerializeToString()
        if len(opening) > MAX_MESSAGE_BYTES:
            message = f"has {len(opening)} bytes once placed; at most {MAX_MESSAGE_BYTES} can be sent"
            raise InvalidRequest("request", message)
        if self.failure is not None:
            raise self.failure
        channel = self.stream.mux.open(opening)
        waits = _Request(channel)
        channel.on_messages = waits.put
        channel.on_end = lambda reason: waits.end(self.failure or _error_of(reason))
        timer = asyncio.get_running_loop().call_later(timeout_s, waits.end, DeadlineExceeded(_TOO_LATE))
        try:
            while True:
                while waits.messages:
                    yield waits.take()
                    channel.resume()
                if waits.ended:
                    if waits.failure is not None:
                        raise waits.failure
                    return
                await waits.waker.sleep()
        finally:
            timer.cancel()
            channel.cancel()

    def break_off(self, failure: ServiceError) -> None:
        """Fail all requests with this error."""
        if self.failure is None:
            self.failure = failure
            self._tasks.cancel()
            self.stream.end()
            self._on_broken()

    async def _connect(self, connecting: Awaitable[None], address: str) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                await connecting
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"not within {CONNECT_S:g} s"
            self.break_off(Unavailable(f"no connection to worker {self._name} at {address} (stream_port): {reason}"))

    def _ended(self, reason: ServiceError) -> None:
        self.break_off(Unavailable(f"the connection to worker {self._name} broke: {reason}"))


_TOO_LATE = "the deadline passed before the request was done"


class _Request:
    """Results of one request that were not taken yet."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.messages: list[bytes] = []
        self._num_bytes = 0
        self.ended = False
        self.failure: ServiceError | None = None
        self.waker = Waker()

    def put(self, messages: Sequence[bytes]) -> None:
        self.messages.extend(messages)
        self._num_bytes += sum(map(len, messages))
        if len(self.messages) >= PAUSE_AT or self._num_bytes >= PAUSE_BYTES:
            self._channel.pause()
        self.waker.wake()

    def take(self) -> Sequence[bytes]:
        messages, self.messages, self._num_bytes = self.messages, [], 0
        return messages

    def end(self, failure: ServiceError | None) -> None:
        if not self.ended:
            self.ended, self.failure = True, failure
            self.waker.wake()


def _error_of(status: bytes) -> ServiceError | None:
    """Return the error with which a worker ended a request; None: the request succeeded."""
    try:
        return from_proto(status_pb2.Status.FromString(status)) if status else None
    except DecodeError as error:
        return Unavailable(f"the worker ended the request with a status that is not a valid message: {error}")
