"""gRPC servers and channels, configured alike in all processes.

Version of the internal protocols between the processes of one cluster.
"""

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.errors import StartError
from cluster.network.tls import Credentials, TlsIdentity
from cluster.process.tasks import Tasks
from cluster.settings import HealthSettings

MAX_MESSAGE_BYTES = 16 << 20
"""Largest message: a prompt of a million tokens fits; a message of 100 MB is refused before it is read."""
MAX_MEDIA_MESSAGE_BYTES = 80 << 20
"""Largest message with pictures: the largest body of a client and a prompt fit."""
MAX_METADATA_BYTES = 16 << 10
"""Largest metadata of a call. gRPC refuses larger ones before any handler runs."""
IDLE_CHANNEL_S = 300.0
"""Seconds after which an unused channel closes; longer than the pauses of a worker in use."""

KEEPALIVE: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
# A server whose limits are stricter than its clients' pings closes quiet streams with too_many_pings.
ALLOW_PINGS: list[tuple[str, int]] = [
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.http2.max_ping_strikes", 0),
]
# All of gRPC's limits that can end a call are listed in docs/design/admission.md.
SIZES: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # With only one of the two limits gRPC refuses at random between them.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
]

MAX_PENDING_CALLS = 65_536
"""Calls that gRPC keeps for a server which has not accepted them yet; each takes 14 KiB.

gRPC drops further ones with a bare CANCELLED, by default from 1,000 on. That many come together at a process that
stands still for seconds, since grpc.aio accepts one call in about five turns of the event loop. So the bound that
clients meet is one of Tandem's own, which is checked after a call is accepted and answers with a typed error."""
MAX_UNACCEPTED_S = 86_400
"""Seconds for which gRPC keeps a call that the server has not accepted; then it drops the call with a bare CANCELLED.

By default 30, which calls wait at a server that stands still again and again. A day is longer than any call waits: its
deadline or its client ends it, or the server accepts it and answers with a typed error."""
PENDING: list[tuple[str, int]] = [
    ("grpc.server_max_unrequested_time_in_server", MAX_UNACCEPTED_S),
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
]

MAX_OPEN_CALLS = 256
"""Streams of health and reflection at a time. They need no key, and an open one holds 20 KiB."""
REFUSED_AFTER_S, MAX_LATE_REFUSALS = 2.0, 1024
"""Delay of the refusal of further ones, so that a client that asks again costs little; and how many are delayed."""
OPEN_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.v1alpha.")
"""Services that may be called without a key."""
PUBLIC_PING_STRIKES = 100
"""Pings above the rate for members after which a client's connection is closed. Many, since the pings of a client come
together at a server that stood still."""
LIVENESS, READINESS = "liveness", "readiness"
"""Health names for supervisors. LIVENESS is SERVING while the event loop runs, also during a drain. READINESS is
SERVING while the process can do new work: started, not stopping, and not cut off."""
READY_EVERY_S = 0.25


class Server:
    """One grpc.aio server with health and reflection.

    It serves after `mark_serving`.
    """

    def __init__(
        self,
        credentials: Credentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        max_connection_s: float | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        is_public: bool = False,
    ) -> None:
        """Create the server.

        With `credentials` it accepts TLS only.

        After `max_connection_s` a connection takes no more calls, so its client opens another one. Clients that are no
        members reach an `is_public` server.
        """
        # Without so_reuseport=0 a second process would silently share a port in use.
        options = dict([*KEEPALIVE, *ALLOW_PINGS, *SIZES, *PENDING, ("grpc.so_reuseport", 0)])
        options["grpc.max_receive_message_length"] = max_message_bytes
        if is_public:
            options["grpc.http2.max_ping_strikes"] = PUBLIC_PING_STRIKES
        if max_connection_s is not None:
            options["grpc.max_connection_age_ms"] = round(max_connection_s * 1e3)
        self.grpc = grpc.aio.server(options=list(options.items()), interceptors=[*interceptors, _OpenCalls()])
        self._credentials = credentials
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        self._services: list[str] = []
        self._stopping = False
        self._tasks = Tasks("readiness is reported no more")
        self._health_only: grpc.aio.Server | None = None

    async def start(self, host: str, port: int, services: Sequence[str], setting: str = "port") -> int:
        """Listen and return the port; 0 lets the system choose.

        Raises StartError naming `setting`.
        """
        self._services = ["", *services]
        names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.grpc)
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set(READINESS, health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            if self._credentials is None:
                bound = self.grpc.add_insecure_port(f"{host}:{port}")
            else:
                bound = self.grpc.add_secure_port(f"{host}:{port}", _server_credentials(self._credentials))
        except RuntimeError as error:
            raise StartError(setting, f"cannot listen on {host}:{port}: {bind_reason(host, port)}") from error
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.grpc.start()
        return bound

    async def start_health(self, host: str, settings: HealthSettings) -> None:
        """Serve health on a port of its own as well, where one is set.

        Raises StartError.
        """
        if settings.health_port is None:
            return
        server = grpc.aio.server(options=[*ALLOW_PINGS, *SIZES, ("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        address = f"{host}:{settings.health_port}"
        try:
            server.add_insecure_port(address)
        except RuntimeError as error:
            reason = bind_reason(host, settings.health_port)
            raise StartError("health_port", f"cannot listen on {address}: {reason}") from error
        await server.start()
        self._health_only = server

    async def mark_serving(self, ready: Callable[[], bool]) -> None:
        """Start serving.

        `ready` is polled: whether this process can do new work.
        """
        await self._set(health_pb2.HealthCheckResponse.SERVING)
        self._tasks.spawn(self._watch(ready))

    async def announce_stop(self) -> None:
        """Report liveness only from now on; calls go on as before."""
        self._stopping = True
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set(READINESS, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        await self._tasks.close()
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
        if self._health_only is not None:
            await self._health_only.stop(None)

    async def _watch(self, ready: Callable[[], bool]) -> None:
        reported: bool | None = None
        while not self._stopping:
            if (now := ready()) != reported:
                status = health_pb2.HealthCheckResponse
                await self._health.set(READINESS, status.SERVING if now else status.NOT_SERVING)
                reported = now
            await asyncio.sleep(READY_EVERY_S)

    async def _set(self, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        for service in self._services:
            await self._health.set(service, status)


class _OpenCalls(grpc.aio.ServerInterceptor):
    """Interceptor that bounds the calls of services that need no key."""

    def __init__(self) -> None:
        self._num_calls = self._num_late = 0

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Return the handler of a call, which counts it where it is of an open service."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(OPEN_SERVICES):
            return handler
        if not handler.response_streaming:
            return handler
        name = "stream_stream" if handler.request_streaming else "unary_stream"
        behavior = getattr(handler, name)
        counted = self._generated(behavior) if inspect.isasyncgenfunction(behavior) else self._written(behavior)
        make = getattr(grpc, f"{name}_rpc_method_handler")
        return make(counted, handler.request_deserializer, handler.response_serializer)

    def _generated(self, behavior: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            if not await self._begins(context):
                return
            try:
                async for response in behavior(request, context):
                    yield response
            finally:
                self._num_calls -= 1

        return call

    def _written(self, behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            if not await self._begins(context):
                return None
            try:
                return await behavior(request, context)
            finally:
                self._num_calls -= 1

        return call

    async def _begins(self, context: Any) -> bool:
        """Count a call and return True; where there are too many, give it that status and return False."""
        if self._num_calls < MAX_OPEN_CALLS:
            self._num_calls += 1
            return True
        if self._num_late < MAX_LATE_REFUSALS:
            self._num_late += 1
            try:
                await asyncio.sleep(REFUSED_AFTER_S)
            finally:
                self._num_late -= 1
        # Not by `abort`, which would keep the call until a collection of garbage.
        context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
        context.set_details(f"{self._num_calls} calls of health and reflection are open, the limit")
        return False


def _server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """Return credentials of a server, whose files are checked at each connection."""
    served = credentials.current()

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(served.key, served.cert)], served.ca)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        if (now := credentials.current()) is served:
            return None  # None keeps the current certificate
        served = now
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), fetch, served.ca is not None)  # type: ignore[arg-type]  # it may


def media_channel(address: str, trust: TlsIdentity | None = None) -> grpc.aio.Channel:
    """Create a channel, as `channel` does, that sends messages with pictures, too."""
    return channel(address, trust, MAX_MEDIA_MESSAGE_BYTES)


def channel(
    address: str, trust: TlsIdentity | None = None, max_sent_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """Create a channel to a process of the cluster; in clear text without `trust`."""
    sizes = dict(SIZES) | {"grpc.max_send_message_length": max_sent_bytes}
    options: list[tuple[str, int | str]] = [*KEEPALIVE, *sizes.items()]
    options += [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 2_000)]
    if trust is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(*trust.pem())
    named = [("grpc.ssl_target_name_override", trust.server_name)] if trust.server_name else []
    return grpc.aio.secure_channel(address, credentials, options=[*options, *named])


@dataclass(slots=True)
class _Link:
    channel: grpc.aio.Channel
    stamp: object
    """Stamp of the certificates with which the channel was opened."""
    num_users: int = 0
    departed: bool = False
    closing: asyncio.TimerHandle | None = None


class Channels:
    """Channels by address, each kept while in use and for a while longer.

    Used from one event loop.

    Without the limit, a fleet whose workers come and go would collect channels that reconnect for ever.
    """

    def __init__(
        self,
        trust: TlsIdentity | None = None,
        idle_s: float = IDLE_CHANNEL_S,
        connect: Callable[[str, TlsIdentity | None], grpc.aio.Channel] = channel,
    ) -> None:
        self._trust = trust
        self._idle_s = idle_s
        self._connect = connect
        self._links: dict[str, _Link] = {}
        self._closing = Tasks("a channel could not be closed")

    @contextmanager
    def using(self, address: str) -> Iterator[grpc.aio.Channel]:
        """Yield the channel to `address`, which stays open within the block."""
        stamp = None if self._trust is None else self._trust.stamp()
        link = self._links.get(address)
        if link is not None and link.stamp != stamp and not link.num_users:
            self._close(address)  # it would reconnect with certificates that were replaced since
            link = None
        if link is None:
            link = self._links[address] = _Link(self._connect(address, self._trust), stamp)
        link.num_users += 1
        link.departed = False
        if link.closing is not None:
            link.closing.cancel()
            link.closing = None
        try:
            yield link.channel
        finally:
            link.num_users -= 1
            if not link.num_users:
                self._release(address, link)

    def departed(self, address: str) -> None:
        """Forget the channel to `address`, whose process has departed."""
        if (link := self._links.get(address)) is not None:
            link.departed = True
            if not link.num_users:
                self._release(address, link)

    @property
    def addresses(self) -> list[str]:
        """Addresses with an open channel."""
        return list(self._links)

    def _release(self, address: str, link: _Link) -> None:
        if link.closing is not None:
            link.closing.cancel()
        wait_s = 0.0 if link.departed else self._idle_s
        link.closing = asyncio.get_running_loop().call_later(wait_s, self._close, address)

    def _close(self, address: str) -> None:
        link = self._links.pop(address)
        if link.closing is not None:
            link.closing.cancel()
        self._closing.spawn(link.channel.close())


def bind_reason(host: str, port: int) -> str:
    """Return the system's reason why a port cannot be bound; gRPC's own error hides it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return "refused"


PROTOCOL = 4
"""Version number, raised with every change that an older process would misunderstand. Routers accept only workers with
their own version, and pair only workers that they accepted."""
