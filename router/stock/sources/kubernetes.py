"""Source of servers: EndpointSlices or pods of Kubernetes, listed once and watched from there.

Copy of the resources that an API server of Kubernetes lists, kept by the events of a watch. Pure.

Resources of Kubernetes that list servers: EndpointSlices of a Service, and pods.

Pure. Other fields of the resources are not read.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import aiohttp
import msgspec

from cluster.network.kubernetes import ApiServer
from router.models.config import PodsEntry, ServerEntry, ServiceEntry
from router.stock.sources.servers import Server, SourceFailed, Trouble, servers_at

log = logging.getLogger(__name__)


class Metadata(msgspec.Struct, rename="camel"):
    """Metadata of a resource, or of a list of resources."""

    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None


class Resource(msgspec.Struct):
    """One resource of any kind."""

    metadata: Metadata


class Conditions(msgspec.Struct):
    """Conditions of an endpoint; an absent one is None."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Endpoint(msgspec.Struct):
    """Pod behind a Service. All its addresses are of one pod, and the first one is used."""

    addresses: tuple[str, ...] = ()
    conditions: Conditions | None = None


class EndpointSlice(Resource, rename="camel"):
    """Some endpoints of a Service, with addresses of one family."""

    address_type: str
    endpoints: tuple[Endpoint, ...] | None = None


class PodCondition(msgspec.Struct):
    """Condition of a pod."""

    type: str
    status: str


class PodStatus(msgspec.Struct):
    """Address and conditions of a pod."""

    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: tuple[PodCondition, ...] | None = None


class Pod(Resource):
    """One pod."""

    status: PodStatus = msgspec.field(default_factory=PodStatus)


FAMILIES = "IPv4", "IPv6", "FQDN"
"""Families of addresses, the preferred one first."""


def endpoints_of(slices: Iterable[EndpointSlice]) -> dict[str, bool]:
    """Return the addresses of a Service's serving endpoints, and whether each drains.

    A Service of two families has slices for each, which list the same pods; those of one family are taken.
    """
    known = list(slices)
    families = {each.address_type for each in known}
    taken = next((family for family in FAMILIES if family in families), "")
    found: dict[str, bool] = {}
    for each in known:
        for endpoint in each.endpoints or () if each.address_type == taken else ():
            conditions = endpoint.conditions or Conditions()
            is_ready = conditions.ready is not False
            is_serving = is_ready if conditions.serving is None else conditions.serving
            if is_serving and endpoint.addresses:
                _add(found, endpoint.addresses[0], not is_ready or conditions.terminating is True)
    return found


def addresses_of(pods: Iterable[Pod]) -> dict[str, bool]:
    """Return the addresses of ready pods, and whether each drains: its deletion has begun."""
    found: dict[str, bool] = {}
    for pod in pods:
        if pod.status.pod_ip and PodCondition("Ready", "True") in (pod.status.conditions or ()):
            _add(found, pod.status.pod_ip, pod.metadata.deletion_timestamp is not None)
    return found


def _add(found: dict[str, bool], address: str, drains: bool) -> None:
    """Add an address; where one that drains and one that does not are equal, a new pod has that of an old one."""
    found[address] = drains and found.get(address, True)


GONE = 410
"""Status of a watch from a version that the server has forgotten."""
R = TypeVar("R", bound=Resource)


class Expired(Exception):
    """Error of a watch whose version the server has forgotten: the resources must be listed again."""


class _List(msgspec.Struct, Generic[R]):
    metadata: Metadata
    items: list[R] | None = None


class _Event(msgspec.Struct):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class Status(msgspec.Struct):
    """Error that the server tells."""

    code: int = 0
    message: str = ""


class Lines:
    """Lines of a stream that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are whole now, without empty ones."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line for line in whole if line.strip()]


class Mirror(Generic[R]):
    """Resources of one kind by name, as of `version`."""

    def __init__(self, kind: type[R]) -> None:
        of_list: Any = _List  # to mypy a class that is a value is no type
        self._of_list: msgspec.json.Decoder[_List[R]] = msgspec.json.Decoder(of_list[kind])
        self._of_event = msgspec.json.Decoder(_Event)
        self._of_object = msgspec.json.Decoder(kind)
        self.held: dict[str, R] = {}
        self.version = ""
        """Version from which a watch goes on; empty where the resources must be listed."""

    def listed(self, body: bytes) -> None:
        """Take over a list. Raises SourceFailed."""
        try:
            found = self._of_list.decode(body)
        except msgspec.MsgspecError as error:
            raise SourceFailed(f"a list has an unknown form: {error}") from None
        if not found.metadata.resource_version:
            raise SourceFailed("a list has no resourceVersion")
        self.held = {each.metadata.name: each for each in found.items or ()}
        self.version = found.metadata.resource_version

    def happened(self, line: bytes) -> None:
        """Take over an event. Raises Expired or SourceFailed, after which the resources must be listed."""
        try:
            event = self._of_event.decode(line)
            if event.type == "ERROR":
                status = msgspec.json.decode(event.object, type=Status)
                self.refused(status.code, status.message)
            if event.type == "BOOKMARK":
                self.version = msgspec.json.decode(event.object, type=Resource).metadata.resource_version
                return
            changed = self._of_object.decode(event.object)
        except msgspec.MsgspecError as error:
            self.version = ""
            raise SourceFailed(f"an event has an unknown form: {error}") from None
        if event.type == "DELETED":
            self.held.pop(changed.metadata.name, None)
        else:
            self.held[changed.metadata.name] = changed
        self.version = changed.metadata.resource_version

    def refused(self, code: int, message: str) -> None:
        """Forget the version, and raise Expired or SourceFailed."""
        self.version = ""
        if code == GONE:
            raise Expired
        raise SourceFailed(f"Kubernetes answers {code}: {message}")


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
