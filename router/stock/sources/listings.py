"""Listings of all sources of a fleet together."""

import asyncio
from collections.abc import AsyncIterator

from router.stock.config import FleetConfig
from router.stock.sources.servers import Server


async def listings(config: FleetConfig) -> AsyncIterator[tuple[Server, ...]]:
    """Yield all servers that the sources list, at first and after each change."""
    yield tuple(Server(entry.url, entry, entry.role) for entry in config.servers if entry.url)
    await asyncio.Event().wait()
