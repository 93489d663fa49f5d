"""The HTTP server of the public API, with limits on a request's head."""

import asyncio
import math
from functools import partial
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cluster.network.http_server import HttpServer
from cluster.network.tls import Credentials
from router.frontend.http.errors import error_of
from router.frontend.http.server.connection import CONNECTION, ClientConnection, CoalescingTransport, UnchunkedTransport

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
        host: str,
        port: int,
        credentials: Credentials | None = None,
        max_connection_s: float | None = None,
        shared: bool = False,
    ) -> None:
        """Bind the port; 0 lets the system choose.

        Raises StartError.

        A connection older than `max_connection_s` ends with its next answer. `shared` is as in HttpServer.
        """
        protocol = partial(_Protocol, max_connection_s)
        options = {"http": protocol, "timeout_keep_alive": KEEP_ALIVE_S}
        super().__init__(host, port, "http_port", credentials, shared, **options)

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
