"""One HTTP exchange: its body, its answer, and its end when the client disconnects."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from cluster.errors import DeadlineExceeded, Draining, InvalidRequest
from cluster.process.life import Drain
from cluster.process.tasks import Endable, Tasks
from router.admission.arrivals import Arrival
from router.frontend.http.body.fields import encoding_of, inflated
from router.frontend.http.errors import CALLER, Caller, ErrorAnswer, HttpRefusal
from router.frontend.http.server import CONNECTION, ClientConnection

BODY_S = 60.0
"""Seconds for the whole body to arrive."""
FAREWELL_S = 1.0
"""Seconds for a client that may not read to take an error."""
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
HEARTBEAT = b": heartbeat\n\n"
"""Comment of a stream of events, which clients drop."""
IGNORED = "x-tandem-ignored"
"""Header that names the fields of a body without effect."""
JSON = {"content-type": "application/json"}


class ClientGone(Exception):
    """The client disconnected."""


class Exchange:
    """Exchange, used by the task that serves it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.caller: Caller | None = scope.get(CALLER)
        """Caller, where another application found it out."""
        self.request_id = ""
        """Request id, sent with the answer once it is known."""
        self.ignored: Sequence[str] = ()
        """Fields of the body without effect, named with the answer."""
        self.started = False
        """Whether the status was sent; later errors can only be events."""
        self.sending = False
        """Whether the client has not yet taken the last bytes."""
        self._beats: asyncio.Task[None] | None = None

    async def body(self, max_bytes: int, arrival: Arrival) -> bytes:
        """Return the body, of `max_bytes` at most also once it is inflated, counted as held by its arrival.

        Raises InvalidRequest for one that is too large, too slow or in an unknown encoding, Refusal while too much is
        held, and ClientGone.
        """
        encoding = encoding_of(self.headers)
        body = await self._read(max_bytes, arrival)
        if not encoding:
            return body
        content = await asyncio.to_thread(inflated, body, encoding, max_bytes)  # it lets go of the GIL
        if len(content) > max_bytes:
            raise _too_large(max_bytes)
        arrival.hold(len(content))
        return content

    async def _read(self, max_bytes: int, arrival: Arrival) -> bytes:
        declared = self.headers.get("content-length", "0")
        if declared.isdigit() and int(declared[:20]) > max_bytes:
            raise _too_large(max_bytes)
        parts, num_bytes = [], 0
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    num_bytes += len(parts[-1])
                    if num_bytes > max_bytes:
                        raise _too_large(max_bytes)
                    arrival.hold(len(parts[-1]))
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise HttpRefusal(408, "request_timeout", f"the body did not arrive within {BODY_S:g} s") from None

    @asynccontextmanager
    async def lasting(self, drain: Drain, limit_s: float | None = None) -> AsyncIterator[None]:
        """Run a block that ends with ClientGone when the client disconnects, and with Draining when the router stops.

        After `limit_s` it ends with DeadlineExceeded. The body must have been read.
        """
        stopped = Draining("this router was told to stop")
        if drain.draining:
            raise stopped
        connection: ClientConnection = self._scope[CONNECTION]
        async with Endable(limit_s, DeadlineExceeded("the deadline passed before the client took the answer")) as block:
            with connection.watching(lambda: block.end(ClientGone())), drain.holding(lambda: block.end(stopped)):
                yield

    @asynccontextmanager
    async def heartbeats(self, every_s: float | None) -> AsyncIterator[None]:
        """Send a comment every so many seconds within a block, up to the first event; None: send none."""
        async with Tasks() as tasks:
            if every_s is not None:
                self._beats = tasks.spawn(self._beat(every_s))
            try:
                yield
            finally:
                await self._stop_beats()

    async def _beat(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            if not self.started:
                await self._start(200, EVENTS)
            await self._push(HEARTBEAT, more=True)

    async def _stop_beats(self) -> None:
        if self._beats is None:
            return
        beats, self._beats = self._beats, None
        beats.cancel()
        await asyncio.wait([beats])
        if not beats.cancelled():
            beats.result()
        self.sending = False

    async def send_events(self, events: bytes) -> None:
        """Send events; returns when the client is not too far behind."""
        await self._stop_beats()
        if not self.started:
            await self._start(200, EVENTS)
        await self._push(events, more=True)

    async def end_events(self, events: bytes) -> None:
        """Send the last events."""
        await self._stop_beats()
        if not self.started:
            await self._start(200, EVENTS)
        await self._push(events, more=False)

    async def send_json(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send the whole answer."""
        await self._start(status, {**JSON, "content-length": str(len(body)), **(headers or {})})
        await self._push(body, more=False)

    async def fail(self, error: ErrorAnswer) -> None:
        """Send an error, as the answer or as the last event.

        A client that does not read gets nothing.
        """
        if self.started and self.sending:
            return  # uvicorn closes the connection of an incomplete answer
        try:
            async with asyncio.timeout(FAREWELL_S):
                if not self.started:
                    await self.send_json(error.body, error.status, error.headers)
                else:
                    await self._push(error.event, more=False)
        except TimeoutError:
            return

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        named = {**headers, "x-request-id": self.request_id} if self.request_id else dict(headers)
        if self.ignored:
            named[IGNORED] = ", ".join(self.ignored)
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _push(self, body: bytes, more: bool) -> None:
        self.sending = True
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self.sending = False


def _too_large(max_bytes: int) -> InvalidRequest:
    return HttpRefusal(413, "request_too_large", f"the body may have {max_bytes} bytes at most (max_body_mib)")
