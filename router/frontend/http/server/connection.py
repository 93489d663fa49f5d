"""A client's connection: notice of a disconnect, and the sending of an answer's head."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
