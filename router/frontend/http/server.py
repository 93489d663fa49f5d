"""The HTTP server of the public API: limits on a request's head, keys, other origins' pages, and notice of disconnects.

A new path is closed until it is opened here. Preflights of browsers are answered.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cluster.errors import ServiceError
from cluster.network.http_server import HttpServer
from cluster.network.tls import Credentials
from router.frontend.http.errors import authorization_of, error_answer, error_of
from router.security.api_keys import ApiKeys

CONNECTION = "tandem.connection"
"""Key of the `ClientConnection` in an ASGI scope."""


class ClientConnection:
    """Connection that reports a disconnect to the request being answered.

    ASGI reports it only to a reader, and a task per request that only reads would cost more than this.
    """

    def __init__(self) -> None:
        self.lost = False
        self._on_lost: Callable[[], object] | None = None

    @contextmanager
    def watching(self, on_lost: Callable[[], object]) -> Iterator[None]:
        """Call `on_lost` when the client disconnects within the block, once at most; at once if it already has."""
        self._on_lost = on_lost
        if self.lost:
            on_lost()
        try:
            yield
        finally:
            self._on_lost = None

    def lose(self) -> None:
        self.lost = True
        if self._on_lost is not None:
            self._on_lost()


class CoalescingTransport:
    """Transport of one answer that sends the head with the first body bytes: one system call and one packet less."""

    __slots__ = ("_begun", "_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._begun = False
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        if not self._begun:
            self._begun, self._head = True, data
            self._loop.call_soon(self._flush)
            return
        if self._head is not None:
            data, self._head = self._head + data, None
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head is not None and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = None


CHUNKED = b"transfer-encoding: chunked\r\n"


class UnchunkedTransport(CoalescingTransport):
    """Transport of one answer to a client of HTTP/1.0, which knows no chunks: a stream ends with the connection.

    uvicorn writes whole chunks, and closes connections of HTTP/1.0 itself.
    """

    __slots__ = ("_is_chunked",)

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport, loop)
        self._is_chunked: bool | None = None

    def write(self, data: bytes) -> None:
        if self._is_chunked is None:
            self._is_chunked = CHUNKED in data
            data = data.replace(CHUNKED, b"", 1)
        elif self._is_chunked:
            data = _unchunked(data)
        if data:
            super().write(data)


def _unchunked(data: bytes) -> bytes:
    """Return the bytes of whole chunks."""
    parts = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        num_bytes = int(size, 16)
        parts.append(rest[:num_bytes])
        data = rest[num_bytes + 2 :]
    return b"".join(parts)


MAX_HEAD_BYTES = 64 << 10
"""Largest head of a request: the path and all headers."""
HEAD_S = 30.0
"""Seconds for the head to arrive."""
KEEP_ALIVE_S = 75
"""Seconds of a connection without a request."""
CLOSED = "the handler is closed"
"""uvloop's message for a closed connection."""


class OpenAiServer(HttpServer):
    """HTTP server of the public API."""

    def __init__(
        self,
        host: str | Path,
        port: int,
        credentials: Credentials | None = None,
        max_connection_s: float | None = None,
        shared: bool = False,
        setting: str = "http_port",
    ) -> None:
        """Bind the port, or a Unix socket, as HttpServer does.

        Raises StartError.

        A connection older than `max_connection_s` ends with its next answer. `shared` is as in HttpServer.
        """
        protocol = partial(_Protocol, max_connection_s)
        options = {"http": protocol, "timeout_keep_alive": KEEP_ALIVE_S}
        super().__init__(host, port, setting, credentials, shared, **options)

    async def start(self, app: Any) -> None:
        await super().start(_told_gently(app))


def _told_gently(app: Any) -> Any:
    """Drop what is sent on a closed connection, as uvicorn does once it knows of the end; uvloop would raise."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_if_there(message: Message) -> None:
            try:
                await send(message)
            except RuntimeError as error:
                if CLOSED not in str(error):
                    raise

        await app(scope, receive, send_if_there)

    return guarded


class _Protocol(HttpToolsProtocol):
    """Protocol with limits on the head of a request, and answers in OpenAI's form."""

    def __init__(self, max_connection_s: float | None, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._old_at = math.inf if max_connection_s is None else self.loop.time() + max_connection_s
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: tuple[int, str] | None = None
        self._connection = ClientConnection()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._connection.lose()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return  # it was refused, and is being closed
        if self._in_head:
            if self._head_timer is None:
                self._time_head()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"path and headers may have {MAX_HEAD_BYTES} bytes at most")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self._connection  # type: ignore[literal-required] # servers may add keys

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refusal = 431, f"path and headers may have {MAX_HEAD_BYTES} bytes at most"
            raise ValueError(self._refusal)  # uvicorn turns this into a refusal
        super().on_headers_complete()
        # uvicorn uses only these methods of a transport
        kind = UnchunkedTransport if self.scope["http_version"] == "1.0" else CoalescingTransport
        self.cycle.transport = kind(self.transport, self.loop)  # type: ignore[assignment]
        if self.loop.time() >= self._old_at:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self._refusal or (400, msg)))

    def _refuse(self, status: int, message: str) -> None:
        self._refusal = status, message
        self._stop_timer()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # in the middle of another answer: no error can be sent
            return
        body = error_of(status, message).body
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()

    def _time_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._refuse, 408, f"no request came within {HEAD_S:g} s")

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


READABLE = ("x-request-id", "x-tandem-ignored", "retry-after", "retry-after-ms")
"""Headers of answers that a page's script may read."""
PREFLIGHT_S = 600
"""Seconds for which browsers keep the answer to a preflight."""


def open_to_pages(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Wrap the application, keys included, for pages of these origins; without any it stays as it is.

    Preflights need no key: browsers send none with them.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("*",),
        allow_headers=("*",),
        expose_headers=READABLE,
        allow_private_network=True,
        max_age=PREFLIGHT_S,
    )


OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/console", "/version", "/openapi.json", "/docs"})
"""Paths without authentication; the console's page itself contains no data."""


def guarded(app: ASGIApp, keys: ApiKeys) -> ASGIApp:
    """Wrap the application so that requests without a key are refused."""
    if not keys.required:
        return app

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            names = (b"authorization", b"x-api-key")
            headers = {name: value for name, value in scope["headers"] if name in names}
            try:
                keys.principal(
                    authorization_of({name.decode(): value.decode("latin-1") for name, value in headers.items()})
                )
            except ServiceError as error:
                await _refuse(error, send)
                return
        await app(scope, receive, send)

    return guard


async def _refuse(error: ServiceError, send: Send) -> None:
    answer = error_answer(error, {})
    headers = {"content-type": "application/json", "content-length": str(len(answer.body)), **answer.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
