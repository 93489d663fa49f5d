"""Compilation of grammars beside an engine's steps.

A request with a grammar is held here until its grammar is compiled and its first mask is known, on a thread of lower
priority. All other messages pass at once, so no stream waits for a grammar of another request.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from cluster.errors import InvalidRequest
from engine.messages.to_engine import Cancel, Generate, ToEngine

if TYPE_CHECKING:
    from engine.sampling.grammar import Grammars

NICENESS = 10
"""Niceness of the compiling thread: about a tenth of a core where steps keep all of them busy."""


class GrammarGate:
    """Gate before an engine's core; used by the thread that handles messages."""

    def __init__(self, grammars: "Grammars | None", wake: Callable[[], None]) -> None:
        """Create the gate; everything passes without `grammars`.

        `wake` is called, on another thread, when `released` has more.
        """
        self._grammars = grammars
        self._wake = wake
        self._held: dict[str, Generate] = {}
        """Requests that are held, by id."""
        self._waiting: SimpleQueue[Generate] = SimpleQueue()
        self._compiled: SimpleQueue[Generate] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def passes(self, message: ToEngine) -> bool:
        """Return whether the core may handle the message now; otherwise it was held, or concerned a held request."""
        if isinstance(message, Cancel) and message.request_id in self._held:
            if message.choice is None:
                del self._held[message.request_id]
            return False
        if not isinstance(message, Generate) or (structured := message.sampling.structured) is None:
            return True
        if self._grammars is None or self._grammars.knows(structured):
            return True
        self._held[message.request_id] = message
        self._start()
        self._waiting.put(message)
        return False

    def released(self) -> list[Generate]:
        """Return the requests whose grammars were compiled meanwhile, but for cancelled ones."""
        messages: list[Generate] = []
        while not self._compiled.empty():  # only this method takes from it
            message = self._compiled.get_nowait()
            if self._held.get(message.request_id) is message:
                del self._held[message.request_id]
                messages.append(message)
        return messages

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        # Of this thread and of those that it starts.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            message = self._waiting.get()
            structured = message.sampling.structured
            assert structured is not None
            assert self._grammars is not None
            # An error is remembered: sampling reports it as the request's failure.
            with contextlib.suppress(InvalidRequest):
                self._grammars.compile_ahead(structured)
            self._compiled.put(message)
            self._wake()
