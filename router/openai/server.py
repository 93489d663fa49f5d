"""uvicorn within the router's process and event loop, with limits on what a client may send before it is heard."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cluster.errors import StartError, TandemError
from router.openai.errors import error_of

MAX_HEAD_BYTES = 64 << 10
"""Of a request before its body: the path and all headers."""
HEAD_S = 30.0
"""For all of that to come."""
KEEP_ALIVE_S = 75
"""Of a connection without a request."""
BACKLOG = 2048
STOP_S = 1
"""For what is left when a router stops."""


class HttpServer:
    """Listens from when it is made: a port that is taken is found before anything else is started."""

    def __init__(self, host: str, port: int) -> None:
        """`port` 0 lets the system choose. Raises StartError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host.strip("[]"), port), family=family, backlog=BACKLOG)
        except OSError as error:
            reason = f"cannot listen on {host}:{port}: {os.strerror(error.errno) if error.errno else error}"
            raise StartError("http_port", reason) from None
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, app: ASGIApp) -> None:
        """Serve; until then connections wait."""
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S,
        )
        self._server = _Server(config)
        self._serving = asyncio.ensure_future(self._server.serve([self._socket]))

    async def failed(self) -> TandemError:
        """Returns when it ended by itself."""
        assert self._serving is not None, "it was started"
        await asyncio.wait([self._serving])
        if self._serving.cancelled() or (error := self._serving.exception()) is None:
            await asyncio.get_running_loop().create_future()  # it was closed
        return TandemError(f"the HTTP server ended: {error!r}")

    async def close(self) -> None:
        """What is under way should be over."""
        if self._server is None or self._serving is None:
            self._socket.close()
            return
        self._server.should_exit = True
        await self._serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's own matter."""
        yield


class _Protocol(HttpToolsProtocol):
    """With limits on the head of a request, and their answers in OpenAI's form."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: tuple[int, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return  # it was told so, and is being closed
        if self._in_head:
            if self._head_timer is None:
                self._time_head()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"path and headers may have {MAX_HEAD_BYTES} bytes at most")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refusal = 431, f"path and headers may have {MAX_HEAD_BYTES} bytes at most"
            raise ValueError(self._refusal)  # uvicorn makes a refusal of it
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self._refusal or (400, msg)))

    def _refuse(self, status: int, message: str) -> None:
        self._refusal = status, message
        self._stop_timer()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # in the middle of another answer: nothing can be said
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
