"""Life of a role's process: announce readiness, run until told to stop, report the cause of a failure.

`Drain` counts the calls in flight that a draining process still waits for.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import uvloop

from cluster.errors import TandemError
from cluster.process.loop_watch import excuse_standstill
from cluster.process.memory import spare_the_started
from cluster.process.tasks import Tasks, happens


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses where a role serves, as host:port; empty where it does not."""

    grpc: str
    http: str = ""
    metrics: str = ""
    internal: str = ""
    """Address where workers join a router, when it differs from `grpc`."""
    start: str = ""
    """Account of a worker's start, for people: how long it took, and where the weights came from."""
    picker: str = ""
    """Address of a router's endpoint picker for gateways."""

    @property
    def joined_at(self) -> str:
        """Address where workers join a router."""
        return self.internal or self.grpc


class Running(Protocol):
    """Interface of a started role."""

    addresses: Addresses

    async def stop_requested(self) -> None:
        """Return when a stop was requested by other means than a signal."""

    async def drain(self) -> None:
        """Refuse new work, and wait until work in flight is over or the drain time has passed."""

    async def stop(self) -> None:
        """Release everything."""

    async def failed(self) -> TandemError:
        """Return the error when the role cannot go on."""


class SignalledRole:
    """Role that goes on, whatever its children do, until a signal ends it."""

    async def failed(self) -> TandemError:
        """Never return."""
        never: asyncio.Future[TandemError] = asyncio.get_running_loop().create_future()
        return await never

    async def stop_requested(self) -> None:
        """Never return."""
        await asyncio.get_running_loop().create_future()


def run_role(start: Callable[[], Coroutine[Any, Any, Running]]) -> int:
    """Run one role to its end and return the exit code.

    The first SIGINT or SIGTERM drains and stops it; a second one ends the process at once.

    Standard output gets one line of JSON when the role serves: {"event": "ready", "address": ...}, with "http",
    "metrics", "internal" and "picker" where it serves those. The last line on standard error of a failed process is the
    cause.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(start))
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


async def _run(start: Callable[[], Coroutine[Any, Any, Running]]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def told() -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signum)
            signal.signal(signum, signal.SIG_DFL)  # the kernel's default ends even a process whose loop hangs
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, told)
    async with Tasks() as tasks:
        starting, stopping = tasks.spawn(start()), tasks.spawn(stop.wait())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return 0
        role = starting.result()
        _announce(role.addresses)
        failing, requested = tasks.spawn(role.failed()), tasks.spawn(role.stop_requested())
        await asyncio.wait([failing, stopping, requested], return_when=asyncio.FIRST_COMPLETED)
        draining = tasks.spawn(role.drain())
        if not failing.done():
            await asyncio.wait([failing, draining], return_when=asyncio.FIRST_COMPLETED)
        failure = failing.result() if failing.done() else None
        if failure is None:
            draining.result()
    await role.stop()
    if failure is not None:
        raise failure
    return 0


def _announce(where: Addresses) -> None:
    ready = {"event": "ready", "address": where.grpc, "http": where.http, "metrics": where.metrics}
    ready["internal"] = where.internal
    if where.picker:
        ready["picker"] = where.picker
    spare_the_started()
    excuse_standstill()
    print(json.dumps(ready), flush=True)


class Drain:
    """Calls in flight of one kind, and how to end each.

    Used from one event loop.
    """

    def __init__(self) -> None:
        self.draining = False
        """Whether new calls are refused."""
        self.over = False
        """Whether the drain time is over and remaining calls were ended."""
        self._ends: dict[object, Callable[[], object]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_calls(self) -> int:
        return len(self._ends)

    @contextmanager
    def holding(self, end: Callable[[], object]) -> Iterator[None]:
        """Register a call in flight for the duration of the block; `end` as in `hold`."""
        call = self.hold(end)
        try:
            yield
        finally:
            self.release(call)

    def hold(self, end: Callable[[], object]) -> object:
        """Register a call in flight and return its handle, until `release`.

        `end` makes it end soon and is called once at most.
        """
        call = object()
        self._ends[call] = end
        self._idle.clear()
        if self.over:
            end()
        return call

    def release(self, call: object) -> None:
        """Remove the call of a handle: it is over."""
        del self._ends[call]
        if not self._ends:
            self._idle.set()

    def begin(self) -> None:
        self.draining = True

    def resume(self) -> None:
        """Take new calls again; calls still in flight were told to end."""
        self.draining = self.over = False

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no call is in flight.

        Returns False if some call still is after `timeout_s`.
        """
        return await happens(self._idle, timeout_s)

    def end_all(self) -> int:
        """End all calls in flight and return their number."""
        self.draining = self.over = True
        ends = list(self._ends.values())
        for end in ends:
            end()
        return len(ends)
