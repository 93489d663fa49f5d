"""Messages of one worker that its membership has not read yet, and the watch over its silence."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from cluster.errors import InvalidRequest, Unavailable
from cluster.fair_turns import Waker
from cluster.process.loop_watch import loop_time
from protos import membership_pb2 as pb

MAX_UNREAD = 4096
"""Messages by which a router may lag; then the membership ends, and the next one begins with a snapshot."""


class Inbox:
    """Inbox of a membership: `put` and `end` by the connection to the worker, `get` by the membership."""

    def __init__(self, silence_s: float) -> None:
        """Create the inbox. Seconds in which this process's own loop stood still are no silence."""
        self._silence_s = silence_s
        self._messages: deque[pb.WorkerMessage] = deque()
        self._waker = Waker()
        self._is_over = False
        self._failure: Exception | None = None
        self._heard_at = loop_time()
        self.is_silent = False
        """Whether nothing came for `silence_s`."""
        self._watch = asyncio.get_running_loop().call_later(silence_s, self._look)

    def opens(self, seconds: float) -> None:
        """Expect nothing for so many seconds, in which a connection to the worker is opened."""
        self._heard_at = loop_time() + seconds

    def put(self, message: pb.WorkerMessage) -> None:
        if self._is_over:
            return
        self._heard_at = loop_time()
        self._messages.append(message)
        if len(self._messages) > MAX_UNREAD:
            self.end(Unavailable(f"this router lags by {MAX_UNREAD} messages of the worker"))
        self._waker.wake()

    def end(self, failure: Exception | None = None) -> None:
        """Let `get` return None once all messages are read, or raise `failure`."""
        if not self._is_over:
            self._is_over, self._failure = True, failure
            self._waker.wake()

    def close(self) -> None:
        """Stop the watch."""
        self._watch.cancel()

    async def get(self) -> pb.WorkerMessage | None:
        """Return the next message, or None at the end and after silence. Raises the failure that ended it."""
        while not self._messages:
            if self._is_over and self._failure is not None:
                raise self._failure
            if self._is_over or self.is_silent:
                return None
            await self._waker.sleep()
        return self._messages.popleft()

    async def follow(self, call: AsyncIterator[pb.WorkerMessage]) -> None:
        """End with a call, which brings no message. `get` raises what the call raised."""
        try:
            async for message in call:
                field = next((field.name for field, _ in message.ListFields()), "load")
                raise InvalidRequest(field, "comes after the Welcome: events come over the worker's stream_port only")
        except Exception as error:  # whatever the call raised, its membership ends with it
            self.end(error)
        finally:
            self.end()

    def _look(self) -> None:
        left_s = self._heard_at + self._silence_s - loop_time()
        if left_s > 0:
            self._watch = asyncio.get_running_loop().call_later(left_s, self._look)
        else:
            self.is_silent = True
            self._waker.wake()
