"""Source of servers: EndpointSlices or pods of Kubernetes, listed once and watched from there."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic

import aiohttp
import msgspec

from cluster.network.kubernetes import ApiServer
from router.models.fleet_config import PodsEntry, ServerEntry, ServiceEntry
from router.stock.sources.mirror import Expired, Lines, Mirror, R, Status
from router.stock.sources.resources import EndpointSlice, Pod, addresses_of, endpoints_of
from router.stock.sources.servers import Server, SourceFailed, Trouble, servers_at

log = logging.getLogger(__name__)

WATCH_S = 60
"""Seconds after which the server ends a watch, and the next one brings the token as it is then."""
SILENCE_S = WATCH_S + 10.0
"""Seconds without a byte after which the server is given up."""
CONNECT_S = 5.0
PAUSE_S = 1.0
"""Seconds between two calls, so that a server that ends each of them at once is not overrun."""
MAX_ERROR_BYTES = 200


@dataclass(frozen=True, slots=True)
class Query(Generic[R]):
    """Resources to follow, and how they are read."""

    about: str
    """Name of the source in the log."""
    path: str
    selector: str
    kind: type[R]
    addresses: Callable[[Iterable[R]], dict[str, bool]]


def of_service(service: ServiceEntry, namespace: str) -> Query[EndpointSlice]:
    """Return the query for a Service's EndpointSlices."""
    return Query(
        f"Service {namespace}/{service.name}",
        f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
        f"kubernetes.io/service-name={service.name}",
        EndpointSlice,
        endpoints_of,
    )


def of_pods(pods: PodsEntry, namespace: str) -> Query[Pod]:
    """Return the query for pods with certain labels."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    return Query(f"pods {pods.selector!r} of {namespace}", path, pods.selector, Pod, addresses_of)


async def watched(entry: ServerEntry, port: int, api: ApiServer, query: Query[R]) -> AsyncIterator[tuple[Server, ...]]:
    """Yield the servers that the query finds, at first and after each event."""
    trouble, mirror = Trouble(query.about), Mirror(query.kind)
    scheme = "https" if entry.https else "http"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
    async with aiohttp.ClientSession(api.url, timeout=timeout) as session:
        while True:
            try:
                async with _asked(session, api, query, mirror) as answer:
                    if not mirror.version:
                        mirror.listed(await answer.read())
                        yield servers_at(entry, scheme, query.addresses(mirror.held.values()), port)
                        continue
                    async for line in _lines(answer):
                        mirror.happened(line)
                        trouble.is_over()
                        yield servers_at(entry, scheme, query.addresses(mirror.held.values()), port)
                trouble.is_over()
            except Expired:
                pass  # the resources are listed next
            except (SourceFailed, aiohttp.ClientError, OSError, TimeoutError) as error:
                trouble.has(str(error) or type(error).__name__)
            await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def _asked(
    session: aiohttp.ClientSession, api: ApiServer, query: Query[R], mirror: Mirror[R]
) -> AsyncIterator[aiohttp.ClientResponse]:
    """List the resources, or watch them from the mirror's version on. Raises Expired, or what tells a failure."""
    parameters = {"labelSelector": query.selector}
    if mirror.version:
        watch = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        parameters |= watch | {"resourceVersion": mirror.version}
    headers = {"Authorization": f"Bearer {api.token()}", "Accept": "application/json"}
    async with session.get(query.path, params=parameters, headers=headers, ssl=api.tls or True) as answer:
        if answer.status != 200:
            text = await answer.read()
            try:
                message = msgspec.json.decode(text, type=Status).message
            except msgspec.MsgspecError:
                message = text[:MAX_ERROR_BYTES].decode(errors="replace")
            mirror.refused(answer.status, message)
        yield answer


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a watch until it ends or breaks, which are the same: the next call tells what is wrong."""
    lines = Lines()
    try:
        async for data in answer.content.iter_any():
            for line in lines.feed(data):
                yield line
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        log.debug("a watch broke: %s", error)
