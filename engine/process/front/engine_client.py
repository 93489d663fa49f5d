"""The front's client of its engine: starts it, sends to it, and dispatches its messages.

An engine in a process of its own, as its front starts, uses and ends it.
"""

import asyncio
import contextlib
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import IO, Any

from cluster.errors import StartError, TandemError, Unavailable
from cluster.process.tasks import Tasks
from cluster.process.tree import descendants
from engine.messages.from_engine import (
    Audited,
    CacheChanged,
    CacheInspected,
    Connected,
    FromEngine,
    GroupDrains,
    ItemsWanted,
    KvUse,
    LoadReport,
    NodeLinked,
    Ready,
    StartFailed,
    StepTokens,
    Token,
)
from engine.messages.to_engine import Audit, CacheDrop, ConnectPeers, InspectCache, ToEngine
from engine.process.front_link import MessageSocket
from engine.process.spec import EngineSpec
from loans.network import Peer

log = logging.getLogger(__name__)


EngineMessage = FromEngine | Token | None


class EngineHost(ABC):
    """Place where an engine runs: a process of its own (`engine_client.py`), or this event loop (`local_engine.py`)."""

    @abstractmethod
    def start(self, listener: "EngineListener") -> None:
        """Start the engine; its first message is Ready or StartFailed."""

    @abstractmethod
    def send(self, messages: Sequence[ToEngine]) -> None:
        """Send messages; they are dropped when the engine process has ended."""

    @abstractmethod
    async def stop(self) -> None:
        """End the engine; returns when it is gone."""

    @abstractmethod
    def processes(self) -> Sequence[int]:
        """Return the process ids of the engine and of all below it; none for an engine in this process."""


class EngineListener(ABC):
    """Receiver of an engine's messages, on the event loop."""

    @abstractmethod
    def on_messages(self, messages: Sequence[FromEngine]) -> None: ...

    @abstractmethod
    def ended(self, how: str) -> None:
        """Process the engine's end, once, after all its messages."""


class RequestListener(ABC):
    """Receiver of what an engine tells of one request, on the event loop."""

    @abstractmethod
    def on_token(self, token_id: int, choice: int) -> None:
        """Process a token of which nothing more is told."""

    @abstractmethod
    def on_message(self, message: EngineMessage) -> None:
        """Process any other message, or None when the engine process has ended."""


class EngineClient(EngineListener):
    """Client used from one event loop."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._listeners: dict[str, RequestListener] = {}
        self._watchers: set[Callable[[CacheChanged | LoadReport], None]] = set()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._num_asked = 0
        self._dead = False
        self.last_load: LoadReport | None = None
        """The engine's last load report."""
        self.last_kv: KvUse | None = None
        self._last_report_at = -math.inf
        self.on_items_wanted: Callable[[ItemsWanted], None] | None = None
        """Function that fetches what a request's items need."""
        self.group_drains = asyncio.Event()
        """Signal that the engine's data-parallel group drains."""
        self.group_is_over = asyncio.Event()
        """Signal that no worker of the group has work left."""
        self._ready: asyncio.Future[Ready]
        self.died: asyncio.Future[TandemError]

    async def start(self) -> Ready:
        """Start the engine and wait until its model is loaded.

        Raises StartError with the engine's reason.
        """
        loop = asyncio.get_running_loop()
        self._ready, self.died = loop.create_future(), loop.create_future()
        self._host.start(self)
        try:
            return await self._ready
        except asyncio.CancelledError:
            await self.stop()
            raise

    def processes(self) -> Sequence[int]:
        """Return the engine's process ids, as its host does."""
        return () if self._dead else self._host.processes()

    @property
    def silent_s(self) -> float:
        """Seconds since the last report; infinite before the first."""
        return time.monotonic() - self._last_report_at

    def send(self, *messages: ToEngine) -> None:
        """Send to the engine.

        When it is gone the message is dropped; listeners learn of the end separately.
        """
        if not self._dead:
            self._host.send(messages)

    def listen(self, name: str, listener: RequestListener) -> None:
        """Tell `listener` of request `name`.

        When the engine process has ended the listener gets None; at once, if it is gone already.
        """
        assert name not in self._listeners
        self._listeners[name] = listener
        if self._dead:
            listener.on_message(None)

    def forget(self, name: str) -> None:
        """Remove the listener of `name`."""
        self._listeners.pop(name, None)

    @contextlib.contextmanager
    def watching(self, watcher: Callable[[CacheChanged | LoadReport], None]):  # type: ignore[no-untyped-def]
        """Call `watcher` with every cache change and load report within the block."""
        self._watchers.add(watcher)
        try:
            yield
        finally:
            self._watchers.discard(watcher)

    async def audit(self) -> Audited:
        """Have the engine check its records.

        Raises Unavailable when the engine process has ended.
        """
        audited: Audited = await self._ask(Audit)
        return audited

    async def inspect_cache(self, drop_pins: bool, tenant: str | None, drop: CacheDrop | None = None) -> CacheInspected:
        """Return what the engine's pool holds, after dropping pins and blocks if wanted.

        Raises Unavailable when the engine process has ended.
        """
        inspected: CacheInspected = await self._ask(lambda number: InspectCache(number, drop_pins, tenant, drop))
        return inspected

    async def connect(self, peers: Sequence[Peer]) -> Sequence[str]:
        """Connect to other engines; return those that cannot be reached, each with the reason.

        Raises Unavailable when the engine process has ended.
        """
        connected: Connected = await self._ask(lambda number: ConnectPeers(number, tuple(peers)))
        return connected.failures

    @property
    def num_loans(self) -> int:
        """Number of loans given, by the last load report."""
        return 0 if self.last_load is None or self._dead else self.last_load.loans

    async def _ask(self, question: Callable[[int], ToEngine]) -> Any:
        """Return the answer to a question, which has the number it is given."""
        if self._dead:
            raise Unavailable("the engine process has ended")
        self._num_asked += 1
        answer = self._answers[self._num_asked] = asyncio.get_running_loop().create_future()
        self.send(question(self._num_asked))
        return await answer

    async def stop(self) -> None:
        """End the engine: orderly first, by force after 5 s."""
        await self._host.stop()

    # ------------------------------------------------------------------ from the engine

    def on_messages(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            match message:
                case StepTokens():  # first, since it comes with each step
                    self._deliver_tokens(message)
                case LoadReport() | CacheChanged():
                    if isinstance(message, LoadReport):
                        self.last_load, self._last_report_at = message, time.monotonic()
                        self.last_kv = message.kv or self.last_kv
                    for watcher in tuple(self._watchers):
                        watcher(message)
                case Ready():
                    if not self._ready.done():
                        self._ready.set_result(message)
                case NodeLinked():
                    pass  # of a node above 0, which has another front
                case StartFailed(reason):
                    field, _, text = reason.partition(": ")
                    if not self._ready.done():
                        self._ready.set_exception(StartError(field, text) if text else StartError("engine", field))
                case Audited(number) | CacheInspected(number) | Connected(number):
                    if not (answer := self._answers.pop(number)).done():
                        answer.set_result(message)
                case GroupDrains(is_over=is_over):
                    self.group_drains.set()
                    if is_over:
                        self.group_is_over.set()
                case ItemsWanted():
                    assert self.on_items_wanted is not None, "this worker serves no requests"
                    self.on_items_wanted(message)
                case _:
                    if (listener := self._listeners.get(message.request_id)) is not None:
                        listener.on_message(message)

    def _deliver_tokens(self, tokens: StepTokens) -> None:
        listeners, choices, details = self._listeners, tokens.choices, tokens.details
        for place, (request_id, token_id) in enumerate(zip(tokens.request_ids, tokens.token_ids, strict=True)):
            if (listener := listeners.get(request_id)) is None:
                continue
            if place in details:
                listener.on_message(details[place])
            else:
                listener.on_token(token_id, choices.get(place, 0))

    async def failed(self) -> TandemError:
        """Return the error once the engine process has ended."""
        return await asyncio.shield(self.died)

    def ended(self, how: str) -> None:
        self._dead = True
        for listener in tuple(self._listeners.values()):
            listener.on_message(None)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(Unavailable("the engine process has ended"))
        if not self._ready.done():
            self._ready.set_exception(StartError("engine", f"{how} while starting"))
        if not self.died.done():
            self.died.set_result(Unavailable(f"the engine process has ended: {how}"))


LAST_LINE_S = 1.0
"""Longest wait for the last line of a dead engine's log, in seconds: a child of the engine may hold the log open."""


class ChildEngine(EngineHost):
    """Engine process (`engine/process/engine_process.py`) at the other end of a socket."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._tasks = Tasks("the engine process has ended, and nobody was told")
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
            self._tasks.spawn(self._await_death())
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
