"""uvicorn inside a process of the cluster: on its event loop, without uvicorn's signal handlers."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from cluster.errors import StartError, TandemError
from cluster.network.tls import Credentials
from cluster.process.tasks import Tasks, failure_of

BACKLOG = 2048
SEND_BUFFER = 256 << 10
"""Send buffer of each connection, in bytes. A client that does not read costs the kernel megabytes without it."""
STOP_S = 1
"""Seconds that open connections get when the process stops."""


class HttpServer:
    """HTTP server that listens from construction, so a port in use is found before anything else starts."""

    def __init__(
        self,
        host: str | Path,
        port: int,
        setting: str,
        credentials: Credentials | None = None,
        shared: bool = False,
        **options: Any,
    ) -> None:
        """Bind the port; `port` 0 lets the system choose. A path for `host` is that of a Unix socket of this user.

        Errors name `setting`. Raises StartError.

        With `credentials` the server accepts TLS only. Other processes may listen at a `shared` port, too; the system
        gives each connection to one of them. `options` are further options of uvicorn.
        """
        try:
            self._socket = _unix_socket(host) if isinstance(host, Path) else _tcp_socket(host, port, shared)
        except OSError as error:
            reason = f"cannot listen on {host}:{port}: {os.strerror(error.errno) if error.errno else error}"
            raise StartError(setting, reason) from None
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self.address = str(host) if isinstance(host, Path) else f"{host}:{self._socket.getsockname()[1]}"
        self._credentials = credentials
        self._options = options
        self._server: _Server | None = None
        self._tasks = Tasks()
        self._serving: asyncio.Task[None] | None = None

    async def start(self, app: Any) -> None:
        """Serve this ASGI application; connections wait until then."""
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_S,
            **self._options,
        )
        config.load()
        if self._credentials is not None:
            # uvicorn's own context would never read the certificate files again
            config.ssl = self._credentials.for_http()
        self._server = _Server(config)
        self._serving = self._tasks.spawn(self._server.serve([self._socket]))

    async def failed(self) -> TandemError:
        """Return when the server ended by itself."""
        assert self._serving is not None, "it was started"
        return TandemError(f"the HTTP server ended: {await failure_of(self._serving)!r}")

    async def close(self) -> None:
        """Stop the server; requests should be over by now."""
        if self._server is None or self._serving is None:
            self._socket.close()
            return
        self._server.should_exit = True
        await self._serving


def _tcp_socket(host: str, port: int, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host.strip("[]"), port), family=family, backlog=BACKLOG, reuse_port=shared)


def _unix_socket(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # of a process that died
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield
