"""An engine in a process of its own, as its front starts, uses and ends it."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from cluster.process.tree import descendants
from engine.messages.to_engine import ToEngine
from engine.process.front.engine_client import EngineHost, EngineListener
from engine.process.message_socket import MessageSocket
from engine.process.spec import EngineSpec

log = logging.getLogger(__name__)

LAST_LINE_S = 1.0
"""Longest wait for the last line of a dead engine's log, in seconds: a child of the engine may hold the log open."""


class ChildEngine(EngineHost):
    """Engine process (`engine/process/engine_process.py`) at the other end of a socket."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._relaying: threading.Thread | None = None
        self._last_line = ""
        """Last line of the engine's log, where it is kept."""

    def start(self, listener: EngineListener) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        own, other = socket.socketpair()
        self._link = MessageSocket(own)
        launch = self._spec.config.kind.launch(self._spec.config)
        with other:
            self._process = subprocess.Popen(
                [*launch.command, str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE if launch.keeps_log else None,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **launch.environment},
            )
        if self._process.stderr is not None:
            self._relaying = threading.Thread(target=self._relay, args=(self._process.stderr,), daemon=True)
            self._relaying.start()
        self._loop.add_reader(self._link.fileno(), self._on_readable)
        self._transmit(self._spec)

    def send(self, messages: Sequence[ToEngine]) -> None:
        self._transmit(messages)

    async def stop(self) -> None:
        """End the process: orderly first, by force after 5 s."""
        with contextlib.suppress(OSError):
            self._link.shut_down_sending()
        try:
            await asyncio.to_thread(self._process.wait, 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def processes(self) -> Sequence[int]:
        return [self._process.pid, *descendants(self._process.pid)]

    def _transmit(self, message: object) -> None:
        try:
            self._link.send(message)
        except OSError:
            log.info("the engine process has ended")  # the socket's end reports it too, and that tells everyone
            return
        if self._link.has_unsent:
            self._loop.add_writer(self._link.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        with contextlib.suppress(OSError):
            self._link.flush()
        if not self._link.has_unsent:
            self._loop.remove_writer(self._link.fileno())

    def _on_readable(self) -> None:
        try:
            batches = self._link.receive()
        except EOFError:
            self._loop.remove_reader(self._link.fileno())
            self._loop.remove_writer(self._link.fileno())
            self._ending = asyncio.ensure_future(self._await_death())
            return
        for batch in batches:
            self._listener.on_messages(batch)

    async def _await_death(self) -> None:
        code = await asyncio.to_thread(self._process.wait)
        if self._relaying is not None:
            await asyncio.to_thread(self._relaying.join, LAST_LINE_S)
        last_line = f": {self._last_line}" if self._last_line else ""
        self._listener.ended(f"its process ended with code {code}{last_line}")

    def _relay(self, log_lines: IO[bytes]) -> None:
        """Forward the engine's log, and keep its last line."""
        for line in log_lines:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            self._last_line = line.decode(errors="replace").strip() or self._last_line
