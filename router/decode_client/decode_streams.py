"""Connections to all workers, one to each for all its requests and events, opened when the worker has joined.

A step's tokens of all requests come in one frame. A client that does not read delays no other: once PAUSE_AT messages
of its request wait here, or PAUSE_BYTES, the worker is told to keep the rest, and later sends it in fewer messages.

An `Inbox` has the messages that the worker's membership has not read yet, and watches over its silence.
"""

import asyncio
import functools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from cluster.errors import DeadlineExceeded, InvalidRequest, ServiceError, Unavailable
from cluster.fair_turns import Waker
from cluster.network.error_status import from_proto
from cluster.network.mux import MAX_MESSAGE_BYTES, Channel
from cluster.network.mux_stream import MuxStream
from cluster.network.tls import MemberIdentity
from cluster.process.loop_watch import loop_time
from cluster.process.tasks import Tasks
from protos import decode_pb2 as pb
from protos import membership_pb2
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import WorkerRecord

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


MAX_UNREAD = 4096
"""Messages by which a router may lag; then the membership ends, and the next one begins with a snapshot."""


class Inbox:
    """Inbox of a membership: `put` and `end` by the connection to the worker, `get` by the membership."""

    def __init__(self, silence_s: float) -> None:
        """Create the inbox. Seconds in which this process's own loop stood still are no silence."""
        self._silence_s = silence_s
        self._messages: deque[membership_pb2.WorkerMessage] = deque()
        self._waker = Waker()
        self._is_over = False
        self._failure: Exception | None = None
        self._heard_at = loop_time()
        self.is_silent = False
        """Whether nothing came for `silence_s`."""
        self._watch = asyncio.get_running_loop().call_later(silence_s, self._look)

    def opens(self, seconds: float) -> None:
        """Expect nothing for so many seconds, in which a connection to the worker is opened."""
        self._heard_at = loop_time() + seconds

    def put(self, message: membership_pb2.WorkerMessage) -> None:
        if self._is_over:
            return
        self._heard_at = loop_time()
        self._messages.append(message)
        if len(self._messages) > MAX_UNREAD:
            self.end(Unavailable(f"this router lags by {MAX_UNREAD} messages of the worker"))
        self._waker.wake()

    def end(self, failure: Exception | None = None) -> None:
        """Let `get` return None once all messages are read, or raise `failure`."""
        if not self._is_over:
            self._is_over, self._failure = True, failure
            self._waker.wake()

    def close(self) -> None:
        """Stop the watch."""
        self._watch.cancel()

    async def get(self) -> membership_pb2.WorkerMessage | None:
        """Return the next message, or None at the end and after silence. Raises the failure that ended it."""
        while not self._messages:
            if self._is_over and self._failure is not None:
                raise self._failure
            if self._is_over or self.is_silent:
                return None
            await self._waker.sleep()
        return self._messages.popleft()

    async def follow(self, call: AsyncIterator[membership_pb2.WorkerMessage]) -> None:
        """End with a call, which brings no message. `get` raises what the call raised."""
        try:
            async for message in call:
                field = next((field.name for field, _ in message.ListFields()), "load")
                raise InvalidRequest(field, "comes after the Welcome: events come over the worker's stream_port only")
        except Exception as error:  # whatever the call raised, its membership ends with it
            self.end(error)
        finally:
            self.end()

    def _look(self) -> None:
        left_s = self._heard_at + self._silence_s - loop_time()
        if left_s > 0:
            self._watch = asyncio.get_running_loop().call_later(left_s, self._look)
        else:
            self.is_silent = True
            self._waker.wake()


class WorkerLink(Protocol):
    """Way of requests to one worker: DecodeStream has the meaning of its members."""

    failure: ServiceError | None

    @property
    def connected(self) -> bool: ...
    @property
    def broken(self) -> bool: ...
    @property
    def idle(self) -> bool: ...
    def generate(self, request: pb.DecodeRequest, timeout_s: float) -> AsyncGenerator[Sequence[bytes]]: ...
    def break_off(self, failure: ServiceError) -> None: ...


class DecodeStreams:
    """Connections by membership: a worker that joins again gets a new one."""

    def __init__(self, fleet: Fleet, trust: MemberIdentity | None = None) -> None:
        self._fleet = fleet
        self._trust = trust
        self._links: dict[WorkerRecord, WorkerLink] = {}

    def to(self, worker: WorkerRecord) -> "WorkerLink":
        """Return an unbroken connection to `worker`.

        It breaks when the worker falls silent. Raises Unavailable for a stock server that has left.
        """
        link = self._links.get(worker)
        if link is None or link.broken:
            if not worker.hello.stream_address:
                raise Unavailable(f"server {worker.worker_id} has left")
            link = self._opened(worker, None)
        return link

    def add(self, worker: WorkerRecord, link: "WorkerLink") -> None:
        """Add the link to a worker that has no stream_port: a stock server, or a simulated worker."""
        self._links[worker] = link

    def open(self, worker: WorkerRecord, inbox: Inbox) -> None:
        """Connect to a worker that has just joined; its events go into `inbox`, which ends with the connection."""
        inbox.opens(CONNECT_S)
        self._opened(worker, inbox)

    def let_go(self) -> None:
        """Drop connections to workers that left, once nothing runs there."""
        for worker, link in tuple(self._links.items()):
            if link.broken or (link.idle and self._fleet.worker(worker.worker_id) is not worker):
                link.break_off(Unavailable(f"worker {worker.worker_id} left"))
                del self._links[worker]

    def _opened(self, worker: WorkerRecord, inbox: Inbox | None) -> DecodeStream:
        self.let_go()
        held = ExitStack()
        # Only the membership's own connection brings events. One that replaces it, for requests until the worker has
        # joined again, has no key.
        key, put = (b"", _no_event) if inbox is None else (worker.stream_key, inbox.put)
        address, name = worker.hello.stream_address, worker.worker_id
        link = DecodeStream(address, key, name, held.close, put, self._trust)
        if inbox is not None:
            held.callback(lambda: inbox.end(link.failure))
        self._links[worker] = link
        fell_silent = functools.partial(link.break_off, Unavailable(f"worker {name} fell silent"))
        worker.on_lost.add(fell_silent)
        held.callback(worker.on_lost.discard, fell_silent)
        return link


def _no_event(event: object) -> None:
    raise InvalidRequest("frame", "has an event, on a connection without the key of a membership")
