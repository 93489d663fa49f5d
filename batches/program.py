"""`python -m batches FOLDER`: files and batches of the router whose `batches_link` is that folder, until SIGTERM."""

import argparse
import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

from batches.api.routes import make_app
from batches.claims import Claims, LockClaims
from batches.router_client import RouterClient
from batches.service import Batches
from cluster.errors import StartError, TandemError
from cluster.logs import set_up
from cluster.process.life import Addresses, Drain, SignalledRole, run_role
from cluster.process.tree import die_with_parent
from engine.host.cores import step_back
from router.batches.link import BATCHES_SOCKET, Link, RouterLink
from router.frontend.http.server import OpenAiServer

NICENESS = 10
"""Niceness of the process once it serves: interactive requests of the same cores go first."""
THREADS = 128
"""Threads for calls of the disk: more than one for each run (`runner.MAX_RUNS`), so that no call of a client waits
until whole files were read."""


class BatchesRole(SignalledRole):
    """Started process."""

    def __init__(
        self,
        address: str,
        batches: Batches,
        router: RouterClient,
        drain: Drain,
        drain_s: float,
        parts: AsyncExitStack,
    ) -> None:
        self.addresses = Addresses("", address)
        self._batches = batches
        self._router = router
        self._drain = drain
        self._drain_s = drain_s
        self._parts = parts

    async def failed(self) -> TandemError:
        return await self._router.failed()

    async def drain(self) -> None:
        """Start no further line, and wait for those in flight."""
        await self._router.unwatch()
        self._drain.begin()
        await self._batches.runner.idle(self._drain_s)

    async def stop(self) -> None:
        await self._parts.aclose()


def main() -> int:
    parser = argparse.ArgumentParser(prog="batches", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder that the router's batches_link names")
    parser.add_argument("--child-of", type=int, metavar="PID", help="router with which this process ends")
    options = parser.parse_args()
    if options.child_of is not None:
        die_with_parent()
        if os.getppid() != options.child_of:
            return 1  # the router ended before
    return run_role(lambda: _started(options.folder))


async def _started(folder: Path) -> BatchesRole:
    try:
        return await start_batches(RouterLink(folder, await Link.awaited(folder)))
    except StartError as error:
        print(json.dumps({"event": "refused", "field": error.field, "reason": error.reason}), flush=True)
        raise


async def start_batches(link: RouterLink) -> BatchesRole:
    """Open the folder of files and batches, serve, and run what is open.

    Raises StartError.
    """
    settings = link.now
    set_up("batches", settings.router_id, settings)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "batches"))
    drain = Drain()
    async with AsyncExitStack() as parts:
        server = OpenAiServer(link.folder / BATCHES_SOCKET, 0, setting="batches_link")
        router = await parts.enter_async_context(RouterClient(link))
        batches = Batches(settings, router.answer, drain, _open_claims(settings))
        parts.push_async_callback(batches.close)
        parts.push_async_callback(server.close)
        await server.start(make_app(batches, link))
        router.watch(drain)
        step_back(NICENESS)
        batches.runner.start()
        held = parts.pop_all()
    return BatchesRole(server.address, batches, router, drain, settings.drain_s, held)


def _open_claims(settings: Link) -> Claims:
    """Return the claims. Raises StartError for an invalid `redis_url`."""
    if not settings.redis_url:
        return LockClaims()
    from batches.redis_claims import RedisClaims

    return RedisClaims(settings.redis_url, settings.cluster_name)


if __name__ == "__main__":
    sys.exit(main())
