"""The life of a role's process: announce readiness, run until told to stop, say why it failed."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

from cluster.errors import TandemError


class Running(Protocol):
    """A started role."""

    address: str

    async def stop(self) -> None:
        """Finish and release everything."""

    async def failed(self) -> TandemError:
        """Returns when the role cannot go on."""


def run_role(start: Callable[[], Awaitable[Running]]) -> int:
    """Run one role to its end; the exit code.

    Standard output gets one line of JSON when the role serves: {"event": "ready", "address": ...}. A failure's
    last line on standard error is its cause.
    """
    try:
        return asyncio.run(_run(start))
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


async def _run(start: Callable[[], Awaitable[Running]]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.set)
    starting = asyncio.ensure_future(start())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return 0
    role = starting.result()
    print(json.dumps({"event": "ready", "address": role.address}), flush=True)
    failing = asyncio.ensure_future(role.failed())
    await asyncio.wait([failing, stopping], return_when=asyncio.FIRST_COMPLETED)
    failure = failing.result() if failing.done() else None
    for task in (failing, stopping):
        task.cancel()
    await role.stop()
    if failure is not None:
        raise failure
    return 0
