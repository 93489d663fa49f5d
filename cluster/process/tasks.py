"""Ownership of tasks: each task has an owner and ends with it, and somebody hears its failure.

asyncio refers to tasks weakly, and keeps a failure until somebody asks for it. So only this module makes tasks, beside
`asyncio.TaskGroup`, and each shape of concurrent work has one form:

- a loop that lives as long as its owner, work that a callback starts, work that its caller does not wait for:
  `Tasks.spawn`, ended by `Tasks.close` in the owner's `close` or `stop`;
- work beside a block: `async with Tasks()`, which ends it however the block ends;
- a race: `first_of`; all of several, or the first failure: `all_of`, which is a TaskGroup; all, whatever fails,
  such as several ends: `each_of`, or `outcomes_of` for the failures;
- a wait with an end: `happens`, or asyncio.timeout;
- a block that others may end, such as a request whose client leaves: `Endable`. Nothing else cancels the task that it
  runs in, and nothing takes a cancellation back.

A failure belongs to whoever awaits the task. Where nobody does, the owner names `on_failure`, which gets it at once. A
failure that neither takes is logged by asyncio: an owner keeps no task that is over.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from contextvars import Context
from types import TracebackType
from typing import Any, Self, TypeVar

from cluster.errors import ServiceError

log = logging.getLogger(__name__)
T = TypeVar("T")


class Tasks:
    """Tasks of one owner, on one event loop."""

    def __init__(self, on_failure: str | Callable[[BaseException], object] | None = None) -> None:
        """Create it; `on_failure` is called with each task's failure, or is a text to log with the failure's traceback.

        None: failures are for those who await the tasks.
        """
        self._on_failure = on_failure
        self._running: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def spawn(self, work: Coroutine[Any, Any, T], context: Context | None = None) -> asyncio.Task[T]:
        """Run a coroutine as a task. Raises RuntimeError after `close`."""
        if self._is_closed:
            work.close()
            raise RuntimeError(f"the owner of {work!r} is closed")
        task = asyncio.create_task(work, context=context)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def join(self, timeout_s: float | None = None) -> None:
        """Wait until all tasks are over, for so long at most."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    def cancel(self) -> None:
        """Cancel all tasks, which are over soon."""
        for task in self._running:
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks and wait until they are over, also when the caller is cancelled meanwhile."""
        self._is_closed = True
        cancelled: asyncio.CancelledError | None = None
        self.cancel()  # once: a second time would interrupt how they end
        while self._running:
            try:
                await asyncio.wait(self._running)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if self._on_failure is None or task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(self._on_failure, str):
            log.error(self._on_failure, exc_info=error)
        else:
            self._on_failure(error)


def log_bugs(text: str) -> Callable[[BaseException], object]:
    """Return an `on_failure` for work whose callers may have left: it logs all but ServiceErrors, which are answers."""
    return lambda error: None if isinstance(error, ServiceError) else log.error(text, exc_info=error)


async def failure_of(task: asyncio.Task[Any]) -> BaseException:
    """Return the failure of a task; never, where it ends otherwise."""
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        return error
    return await asyncio.Future()


async def happens(event: asyncio.Event, within_s: float) -> bool:
    """Wait for an event, for so long at most; return whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await event.wait()
    return event.is_set()


async def first_of(*works: Coroutine[Any, Any, T]) -> T:
    """Return what ends first, of several that end together the first; the others are cancelled."""
    async with Tasks() as tasks:
        running = [tasks.spawn(work) for work in works]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in running if task.done()).result()


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all; the first failure cancels the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        first, *others = failures.exceptions
        raise first from (failures if others else None)
    return [task.result() for task in tasks]


async def outcomes_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T | Exception]:
    """Return the result of each, or its failure."""

    async def outcome(work: Coroutine[Any, Any, T]) -> T | Exception:
        try:
            return await work
        except Exception as failure:
            return failure

    return await all_of(map(outcome, works))


async def each_of(works: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Wait until all are over; the first failure cancels no other, and is raised afterwards."""
    for outcome in await outcomes_of(works):
        if isinstance(outcome, Exception):
            raise outcome


class Endable:
    """Block that others may end, once at most: `async with Endable() as block`, then `block.end(error)`."""

    def __init__(self, limit_s: float | None = None, late: Exception | None = None) -> None:
        """Create it; after `limit_s` seconds the block ends with the error `late`."""
        self._limit = asyncio.timeout(limit_s)
        self._error = late
        self._is_open = False

    def end(self, error: Exception) -> None:
        """Have the block raise an error where it waits next; nothing where it is over, or was ended before."""
        if self._is_open and not self._limit.expired():
            self._is_open, self._error = False, error
            self._limit.reschedule(0)

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            ended_by, self._error = self._error, None
            try:
                raise ended_by or TimeoutError from None
            finally:
                del ended_by  # a failure that its own traceback refers to stays until garbage is collected
