"""The front's end of its engine process: starts it, sends to it, and hands what it says to whoever it concerns."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable

from cluster.errors import StartError, TandemError, Unavailable
from engine.messages import (
    Audit,
    Audited,
    CacheChanged,
    FromEngine,
    LendClosed,
    LendReady,
    LendRefused,
    LendStarting,
    Load,
    Ready,
    StartFailed,
    ToEngine,
    Token,
)
from engine.worker.config import Role, WorkerConfig
from engine.worker.engine_process import EngineSpec
from engine.worker.link import MessageLink

log = logging.getLogger(__name__)

Letter = FromEngine | LendClosed | None


class Mailbox(asyncio.Queue[Letter]):
    """Messages of one request or loan; None when the engine is gone. A loan's service adds LendClosed when its borrower
    is done."""

    def peek(self) -> Letter:
        """What comes next, if it is there; else None, as if the engine were gone."""
        return None if self.empty() else self._queue[0]  # type: ignore[attr-defined]


class EngineClient:
    """Used from one event loop."""

    def __init__(self, config: WorkerConfig, role: Role, agent_name: str) -> None:
        self._spec = EngineSpec(config, role, agent_name)
        self._mailboxes: dict[str, Mailbox] = {}
        self._watchers: set[Callable[[CacheChanged | Load], None]] = set()
        self._audits: dict[int, asyncio.Future[Audited]] = {}
        self._audit_count = 0
        self._dead = False
        self._ready: asyncio.Future[Ready]
        self.died: asyncio.Future[TandemError]

    async def start(self) -> Ready:
        """Start the process and wait until its model is loaded. Raises StartError with the engine's reason."""
        loop = asyncio.get_running_loop()
        self._ready, self.died = loop.create_future(), loop.create_future()
        own, other = socket.socketpair()
        self._link = MessageLink(own)
        with other:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork and exec; waiting for it is on a thread
                [sys.executable, "-m", "engine.worker.engine_process", str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        self._loop = loop
        loop.add_reader(self._link.fileno(), self._on_readable)
        self._transmit(self._spec)
        try:
            return await self._ready
        except asyncio.CancelledError:
            await self.stop()
            raise

    def send(self, *messages: ToEngine) -> None:
        """To the engine; silently nowhere when it is gone, which every mailbox learns by itself."""
        if not self._dead:
            self._transmit(messages)

    def open_mailbox(self, name: str) -> Mailbox:
        """Everything the engine says about request or loan `name` from now on."""
        assert name not in self._mailboxes
        mailbox = Mailbox()
        if self._dead:
            mailbox.put_nowait(None)
        self._mailboxes[name] = mailbox
        return mailbox

    def close_mailbox(self, name: str) -> None:
        self._mailboxes.pop(name, None)

    @contextlib.contextmanager
    def watching(self, watcher: Callable[[CacheChanged | Load], None]):  # type: ignore[no-untyped-def]
        """Call `watcher` with every cache change and load report within the block."""
        self._watchers.add(watcher)
        try:
            yield
        finally:
            self._watchers.discard(watcher)

    async def audit(self) -> Audited:
        """The engine's books, checked now. Raises Unavailable when the engine is gone."""
        if self._dead:
            raise Unavailable("the engine is gone")
        self._audit_count += 1
        number = self._audit_count
        answer = self._audits[number] = asyncio.get_running_loop().create_future()
        self.send(Audit(number))
        books: Audited = await answer
        return books

    async def stop(self) -> None:
        """End the process: orderly first, by force after 5 s."""
        with contextlib.suppress(OSError):
            self._link.shut_down_sending()
        try:
            await asyncio.to_thread(self._process.wait, 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    # ------------------------------------------------------------------ from the engine

    def _transmit(self, message: object) -> None:
        try:
            self._link.send(message)
        except OSError:
            log.info("the engine is gone")  # reading says so too, and that tells everyone
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
            self._dispatch(batch)

    async def _await_death(self) -> None:
        self._on_death(await asyncio.to_thread(self._process.wait))

    def _dispatch(self, batch: list[FromEngine]) -> None:
        for message in batch:
            match message:
                case Token(request_id):  # first, since most are
                    self._deliver(request_id, message)
                case Load() | CacheChanged():
                    for watcher in tuple(self._watchers):
                        watcher(message)
                case Ready():
                    if not self._ready.done():
                        self._ready.set_result(message)
                case StartFailed(reason):
                    field, _, text = reason.partition(": ")
                    if not self._ready.done():
                        self._ready.set_exception(StartError(field, text) if text else StartError("engine", field))
                case Audited(audit_id):
                    if not (answer := self._audits.pop(audit_id)).done():
                        answer.set_result(message)
                case LendStarting(loan_id) | LendReady(loan_id) | LendRefused(loan_id):
                    self._deliver(loan_id, message)
                case _:
                    self._deliver(message.request_id, message)

    def _deliver(self, name: str, message: FromEngine) -> None:
        if (mailbox := self._mailboxes.get(name)) is not None:
            mailbox.put_nowait(message)

    def _on_death(self, code: int) -> None:
        self._dead = True
        for mailbox in self._mailboxes.values():
            mailbox.put_nowait(None)
        for answer in self._audits.values():
            if not answer.done():
                answer.set_exception(Unavailable("the engine is gone"))
        if not self._ready.done():
            self._ready.set_exception(StartError("engine", f"its process ended with code {code} while starting"))
        if not self.died.done():
            self.died.set_result(Unavailable(f"the engine process ended with code {code}"))
