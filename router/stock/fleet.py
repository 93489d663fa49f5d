"""Stock servers of a router: as sources list them, each is met, watched and left.

Start of a fleet of stock servers with its router.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

from cluster.errors import ServiceError, StartError, TandemError
from cluster.process.tasks import Tasks, failure_of
from engine.model.hub import repository_of
from router.models.config import FleetConfig, ModelEntry, ModelsConfig
from router.models.model_runtimes import ModelRuntimes
from router.stock.facts import ServerAccess, ServerApi, ServerFacts, ask
from router.stock.member import Member, Surroundings
from router.stock.sources.listings import listings
from router.stock.sources.servers import Server

log = logging.getLogger(__name__)


class StockFleet:
    """All servers of a fleet."""

    def __init__(self, config: FleetConfig, around: Surroundings) -> None:
        self._config = config
        self._around = around
        self._members: dict[tuple[str, str], Member] = {}
        """Members by URL and role."""
        self._tasks = Tasks("a stock server is followed no more")
        self._sources = Tasks()
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follow the sources. Raises StartError where one cannot be followed at all."""
        self._following = self._sources.spawn(self._follow(listings(self._config)))

    async def close(self) -> None:
        """Leave all servers at once."""
        await self._sources.close()
        await self._tasks.close()
        await self._around.access.close()
        self._around.zmq.destroy(linger=0)

    async def failed(self) -> TandemError:
        """Return the error that ended the following of sources; without one this waits for ever."""
        assert self._following is not None
        if isinstance(error := await failure_of(self._following), TandemError):
            return error
        raise error

    async def _follow(self, listed: AsyncIterator[tuple[Server, ...]]) -> None:
        async for servers in listed:
            self._update(servers)

    def _update(self, servers: tuple[Server, ...]) -> None:
        listed = {(server.url, server.role): server for server in servers}
        for key in [key for key in self._members if key not in listed]:
            self._members.pop(key).leave()
        for key, server in listed.items():
            if key in self._members:
                self._members[key].listed(server)
            else:
                member = self._members[key] = Member(server, self._around)
                self._tasks.spawn(member.run())


ASK_AGAIN_S = 1.0
Settings = TypeVar("Settings", bound=ModelsConfig)


async def with_model(config: Settings) -> Settings:
    """Return the settings with the model that a fleet's servers name, where the settings name none.

    Waits for the first server that answers. Raises StartError for a model that this host cannot read.
    """
    fleet = config.fleet
    if fleet is None or config.models or (config.model is not None and fleet.name):
        return config
    facts = await _first_answer(fleet)
    path = config.model or Path(facts.root)
    if config.model is None and not path.is_dir() and repository_of(path) is None:
        reason = f"the servers name {facts.root}, which this host cannot read: name its directory or repository"
        raise StartError("fleet.model", reason)
    entry = ModelEntry(path=path, name=fleet.name or facts.model)
    return config.model_copy(update={"model": None, "models": (entry,)})


async def _first_answer(fleet: FleetConfig) -> ServerFacts:
    listed = listings(fleet)
    access, has_warned = ServerAccess.of(fleet), False
    latest: tuple[Server, ...] = ()

    async def follow() -> None:
        nonlocal latest
        async for servers in listed:
            latest = servers

    tasks = Tasks("the sources of stock servers are followed no more")
    tasks.spawn(follow())
    try:
        while True:
            for server in latest:
                try:
                    return await ask(ServerApi(server.url, access))
                except ServiceError as error:
                    if not has_warned:
                        log.warning("%s; fleet.model and fleet.name would let the router start without", error)
                    has_warned = True
            await asyncio.sleep(ASK_AGAIN_S if has_warned else 0.05)
    finally:
        await tasks.close()
        await access.close()


def open_fleet(
    config: FleetConfig, models: ModelRuntimes, silence_s: float, on_lost: Callable[[str], object]
) -> StockFleet:
    """Start to follow a fleet's servers, within a running loop. Raises StartError for files that cannot be read."""
    around = Surroundings(config, models, ServerAccess.of(config), silence_s, on_lost)
    fleet = StockFleet(config, around)
    fleet.start()
    return fleet
