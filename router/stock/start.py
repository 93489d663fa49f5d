"""Start of a fleet of stock servers with its router."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cluster.errors import ServiceError, StartError
from engine.model.hub import repository_of
from router.models.config import ModelEntry, ModelsConfig
from router.models.fleet_config import FleetConfig
from router.models.model_runtimes import ModelRuntimes
from router.stock.facts import ServerFacts, ask
from router.stock.fleet import StockFleet
from router.stock.member import Surroundings
from router.stock.server_api import ServerAccess, ServerApi
from router.stock.sources.listings import listings
from router.stock.sources.servers import Server

log = logging.getLogger(__name__)

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

    following = asyncio.ensure_future(follow())
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
        following.cancel()
        await access.close()


def open_fleet(
    config: FleetConfig, models: ModelRuntimes, silence_s: float, on_lost: Callable[[str], object]
) -> StockFleet:
    """Start to follow a fleet's servers, within a running loop. Raises StartError for files that cannot be read."""
    around = Surroundings(config, models, ServerAccess.of(config), silence_s, on_lost)
    fleet = StockFleet(config, around)
    fleet.start()
    return fleet
