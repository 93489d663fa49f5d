"""Link from an engine process to its front, for the program of every backend."""

import time

from engine.messages.from_engine import FromEngine
from engine.messages.to_engine import ToEngine
from engine.process.message_socket import MessageSocket, SocketWaiter
from engine.process.spec import EngineSpec


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
