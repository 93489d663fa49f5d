"""A client's connection: its end, as the request on it is told, and how the head of an answer leaves."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CONNECTION = "tandem.connection"
"""Of an ASGI scope: the `ClientConnection` by which its request came."""


class ClientConnection:
    """Tells the request that is being answered when its client has gone: as long as nobody reads from it, no ASGI
    message would, and a task for each request that only reads would cost more than this."""

    def __init__(self) -> None:
        self.lost = False
        self._on_lost: Callable[[], object] | None = None

    @contextmanager
    def request_metrics(self, on_lost: Callable[[], object]) -> Iterator[None]:
        """`on_lost` is called once at most, within the block; at once if the client has gone already."""
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
    """A transport for one answer, whose head leaves with what follows it at once: one system call less, and one packet
    less for the client to read."""

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
