"""Stock servers of a router: as sources list them, each is met, watched and left."""

import asyncio
import logging
from collections.abc import AsyncIterator

from cluster.errors import TandemError
from router.models.fleet_config import FleetConfig
from router.stock.member import Member, Surroundings
from router.stock.sources.listings import listings
from router.stock.sources.servers import Server

log = logging.getLogger(__name__)


class StockFleet:
    """All servers of a fleet."""

    def __init__(self, config: FleetConfig, around: Surroundings) -> None:
        self._config = config
        self._around = around
        self._members: dict[tuple[str, str], tuple[Member, asyncio.Task[None]]] = {}
        """Members by URL and role."""
        self._ending: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follow the sources. Raises StartError where one cannot be followed at all."""
        self._following = asyncio.ensure_future(self._follow(listings(self._config)))

    async def close(self) -> None:
        """Leave all servers at once."""
        tasks = [task for _, task in self._members.values()] + list(self._ending)
        if self._following is not None:
            tasks.append(self._following)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._around.access.close()
        self._around.zmq.destroy(linger=0)

    async def failed(self) -> TandemError:
        """Return the error that ended the following of sources; without one this waits for ever."""
        assert self._following is not None
        try:
            await asyncio.shield(self._following)
        except TandemError as error:
            return error
        raise AssertionError("sources do not end")

    async def _follow(self, listed: AsyncIterator[tuple[Server, ...]]) -> None:
        async for servers in listed:
            self._update(servers)

    def _update(self, servers: tuple[Server, ...]) -> None:
        listed = {(server.url, server.role): server for server in servers}
        for key in [key for key in self._members if key not in listed]:
            member, task = self._members.pop(key)
            member.leave()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        for key, server in listed.items():
            if key in self._members:
                self._members[key][0].listed(server)
            else:
                member = Member(server, self._around)
                task = asyncio.ensure_future(member.run())
                task.add_done_callback(_log_failure)
                self._members[key] = member, task


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a stock server is followed no more", exc_info=error)
