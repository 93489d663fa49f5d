"""Link from an engine process to its front, for the program of every backend.

Socket between a front and its engine process: pickled batches, non-blocking on both sides.
"""

import os
import pickle
import selectors
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from engine.messages.from_engine import FromEngine
from engine.messages.to_engine import ToEngine
from engine.process.spec import EngineSpec

_HEADER = struct.Struct("<I")
_CHUNK = 64 << 10
"""Bytes read at once."""


class MessageSocket:
    """One end of the socket.

    Unsent messages are kept here, so that no side waits for a slow reader.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._outgoing = bytearray()
        self._incoming = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` should be called once the socket is writable."""
        return bool(self._outgoing)

    def send(self, message: Any) -> None:
        """Send a message.

        Raises OSError when the other end is gone.
        """
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._outgoing += _HEADER.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Send as much as possible now."""
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            return

    def receive(self) -> list[Any]:
        """Return the complete messages.

        Raises EOFError when the other end is gone and all its messages were read.
        """
        gone = False
        try:
            while chunk := self._socket.recv(_CHUNK):
                self._incoming += chunk
                if len(chunk) < _CHUNK:
                    break  # nothing more is there, most likely; what is wakes the reader again
            gone = not chunk
        except BlockingIOError:
            pass
        except ConnectionError:
            gone = True
        messages = self._whole_messages()
        if gone and not messages:
            raise EOFError
        return messages

    def shut_down_sending(self) -> None:
        """Close the sending direction: the other end gets EOFError, and this end can still receive."""
        self._socket.shutdown(socket.SHUT_WR)

    def _whole_messages(self) -> list[Any]:
        messages, start, size = [], 0, len(self._incoming)
        while size - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._incoming, start)
            end = start + _HEADER.size + length
            if end > size:
                break
            with memoryview(self._incoming) as view:
                messages.append(pickle.loads(view[start + _HEADER.size : end]))
            start = end
        del self._incoming[:start]
        return messages


class SocketWaiter:
    """Waits for a socket, or for `wake` from another thread, without a thread of its own."""

    def __init__(self, link: MessageSocket) -> None:
        self._link = link
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ)
        self._selector.register(self._event, selectors.EVENT_READ)
        self._watches_writing = False

    def watch(self, descriptor: int, on_readable: Callable[[], object]) -> None:
        """End waits also when `descriptor` is readable, and call a function then."""
        self._selector.register(descriptor, selectors.EVENT_READ, on_readable)

    def watch_writing(self, descriptor: int, is_wanted: bool) -> None:
        """Call the function of `descriptor` also when it is writable."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_wanted else 0)
        self._selector.modify(descriptor, events, self._selector.get_key(descriptor).data)

    def unwatch(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def wake(self) -> None:
        """End the current or next wait.

        From any thread.
        """
        os.eventfd_write(self._event, 1)

    def wait(self, timeout_s: float) -> None:
        """Wait for a message, `wake` or the timeout; flush when the socket is writable."""
        if self._link.has_unsent is not self._watches_writing:
            self._watches_writing = self._link.has_unsent
            writing = selectors.EVENT_WRITE if self._watches_writing else 0
            self._selector.modify(self._link, selectors.EVENT_READ | writing)
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._link and events & selectors.EVENT_WRITE:
                self._link.flush()
            elif key.fileobj == self._event:
                os.eventfd_read(self._event)
            elif key.data is not None:
                key.data()


class FrontLink:
    """The front as the engine sees it; messages of one loop turn leave together."""

    def __init__(self, link: MessageSocket) -> None:
        self._link = link
        self._waiter = SocketWaiter(link)
        self._outgoing: list[FromEngine] = []
        self.wake = self._waiter.wake
        self.watch = self._waiter.watch
        self.watch_writing = self._waiter.watch_writing
        self.unwatch = self._waiter.unwatch

    def send(self, message: FromEngine) -> None:
        self._outgoing.append(message)

    def flush(self) -> None:
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            self._link.send(outgoing)

    def listen(self, timeout_s: float) -> list[ToEngine]:
        """Wait up to `timeout_s` and return the messages that arrived, in order.

        Raises EOFError when the front is gone.
        """
        self._waiter.wait(timeout_s)
        return [message for batch in self._link.receive() for message in batch]

    def pause(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a message, or for `wake`; messages stay where they are."""
        self._waiter.wait(timeout_s)

    def finish(self, timeout_s: float = 5.0) -> None:
        """Send the remaining messages, for as long as the front reads."""
        self.flush()
        give_up_at = time.monotonic() + timeout_s
        while self._link.has_unsent and time.monotonic() < give_up_at:
            self._waiter.wait(0.1)


def receive_spec(link: MessageSocket) -> EngineSpec:
    """Wait for the first message, which says what to start."""
    waiter = SocketWaiter(link)
    while not (messages := link.receive()):
        waiter.wait(1.0)
    spec: EngineSpec = messages[0]
    return spec
