"""Listings of all sources of a fleet together."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping

from cluster.network.kubernetes import ApiServer
from cluster.process.tasks import Tasks
from router.models.config import FleetConfig, ServiceEntry
from router.stock.sources.kubernetes import of_pods, of_service, watched
from router.stock.sources.servers import Server, read_again, resolved


def listings(config: FleetConfig) -> AsyncGenerator[tuple[Server, ...], None]:
    """Return all servers that the sources list, as soon as there is one and after each change.

    A source that fails for a while keeps what it listed last. Raises StartError at once where Kubernetes is to be asked
    and the account there cannot be read.
    """
    latest: list[tuple[Server, ...]] = [
        (Server(entry.url, entry, entry.role),) if entry.url else () for entry in config.servers
    ]
    sources = {number: _source(number, config) for number, entry in enumerate(config.servers) if not entry.url}
    return _changes(latest, sources)


async def _changes(
    latest: list[tuple[Server, ...]], sources: Mapping[int, AsyncIterator[tuple[Server, ...]]]
) -> AsyncGenerator[tuple[Server, ...], None]:
    """Yield the merged lists, of which those of `sources` change."""
    changed = asyncio.Event()
    changed.set()

    async def follow(number: int, source: AsyncIterator[tuple[Server, ...]]) -> None:
        async for servers in source:
            latest[number] = servers
            changed.set()

    told: tuple[Server, ...] = ()
    async with Tasks() as tasks:
        following = [tasks.spawn(follow(number, source)) for number, source in sources.items()]
        for task in following:
            task.add_done_callback(lambda _: changed.set())
        while True:
            await changed.wait()
            changed.clear()
            for task in following:
                if task.done():
                    task.result()  # a source never ends, so this raises why it failed
            if (servers := merged(latest)) != told:
                told = servers
                yield servers


def merged(lists: Iterable[tuple[Server, ...]]) -> tuple[Server, ...]:
    """Return all servers, each URL once: as the first list that has it says."""
    found: dict[str, Server] = {}
    for servers in lists:
        for server in servers:
            found.setdefault(server.url, server)
    return tuple(found.values())


def _source(number: int, config: FleetConfig) -> AsyncIterator[tuple[Server, ...]]:
    """Start to follow an entry that is no URL. Raises StartError."""
    entry = config.servers[number]
    if entry.dns:
        return resolved(entry)
    if entry.file is not None:
        return read_again(entry, entry.file)
    api = ApiServer.of(config.kubernetes, "fleet.kubernetes")
    asked = entry.service or entry.pods
    assert asked is not None
    kind = "pods" if entry.service is None else "service"
    namespace = asked.namespace or api.namespace(f"fleet.servers.{number}.{kind}.namespace")
    if isinstance(asked, ServiceEntry):
        return watched(entry, asked.port, api, of_service(asked, namespace))
    return watched(entry, asked.port, api, of_pods(asked, namespace))
