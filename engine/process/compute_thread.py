"""Thread on which an engine's model is made and its batches are computed, beside the loop that handles messages."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
STOP_S = 5.0
"""Seconds for the running call to end when the thread is stopped: an interpreter that exits under it would crash."""


@dataclass(frozen=True, slots=True)
class _Call:
    tag: Any
    compute: Callable[[], Any]


class ComputeThread(Generic[Result]):
    """Thread that makes something and then performs calls, in the order in which they are given.

    One thread does all of it, because OpenMP keeps a team of threads for each thread that ever computed. With more of
    them than cores they stop waiting actively, and steps take nearly twice as long.
    """

    def __init__(
        self,
        make: Callable[[], Result],
        wake: Callable[[], None],
        idle: Callable[[], None] | None = None,
        look_every_s: float = 1.0,
    ) -> None:
        """Start the thread, which calls `make` first.

        `wake` is called on it after each call. `idle` is called on it before each call, and every `look_every_s`
        seconds while it waits for one.
        """
        self._make, self._wake, self._idle, self._look_every_s = make, wake, idle, look_every_s
        self._made: Future[Result] = Future()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        self.num_pending = 0
        """Number of calls whose results were not taken."""
        self._thread = threading.Thread(target=self._run, name="engine-compute", daemon=True)
        self._thread.start()

    def made(self) -> Result:
        """Wait until it is made, and return it.

        Raises what `make` raised.
        """
        return self._made.result()

    def submit(self, tag: Any, compute: Callable[[], Any]) -> None:
        """Perform `compute` after all earlier calls; `take` returns its result with `tag`."""
        self.num_pending += 1
        self._calls.put(_Call(tag, compute))

    def take(self) -> tuple[Any, Any] | None:
        """Return the tag and the result of the next finished call; None while it runs.

        Raises what the call raised.
        """
        if self._results.empty():  # only this method takes from it
            return None
        tag, result = self._results.get_nowait()
        self.num_pending -= 1
        if isinstance(result, BaseException):
            raise result
        return tag, result

    def stop(self) -> None:
        """Stop after the calls given so far, if these end in time."""
        self._calls.put(None)
        self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            made = self._make()
        except BaseException as error:
            self._made.set_exception(error)
            return
        self._made.set_result(made)
        del made
        while (call := self._next()) is not None:
            try:
                result = call.compute()
            except BaseException as error:
                result = error
            self._results.put((call.tag, result))
            del call, result  # nothing is kept alive while the thread waits
            self._wake()

    def _next(self) -> _Call | None:
        while self._idle is not None:
            self._idle()
            with contextlib.suppress(Empty):
                return self._calls.get(timeout=self._look_every_s)
        return self._calls.get()
