"""Assembly and life of a router process."""

import logging
import secrets
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from cluster.discovery.discovery import Discovery, RouterEntry
from cluster.discovery.open_discovery import open_discovery
from cluster.errors import StartError, TandemError
from cluster.install import needing
from cluster.metrics import MetricsServer, new_registry
from cluster.network.rpc import Server
from cluster.network.tls import Credentials, MemberIdentity
from cluster.process.life import Addresses, Drain, SignalledRole
from cluster.process.loop_watch import watch_loop
from cluster.process.tasks import first_of
from protos import membership_pb2_grpc as pb_grpc
from router.admission.arrivals import Arrivals
from router.admission.dispatcher import Dispatcher
from router.admission.limits.tenant_limits import Shares, TenantLimits
from router.config import RouterConfig
from router.frontend.grpc_service import NAME, InferenceService
from router.membership.membership_service import MembershipService
from router.models.model_files import ModelFiles, fetch_models, read_models
from router.models.model_runtime import ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.observability.metrics import ClusterCollector, RouterMetrics
from router.observability.record_file import RecordFile
from router.observability.tracing import Tracing
from router.placement.fleet.fleet import Fleet
from router.placement.terms import further_terms
from router.request_path.observation import Accounting, Observer
from router.request_path.preprocess import Preprocessor
from router.request_path.queries import Queries
from router.request_path.request_handler import RequestHandler
from router.request_path.warming import Warming
from router.security.api_keys import ApiKeys, KeyInterceptor
from router.usage import USAGE_DAYS, FileLedger, MemoryLedger, UsageLedger

if TYPE_CHECKING:
    from router.admission.limits.redis_quota import RedisLedger
    from router.frontend.http.server import OpenAiServer
    from router.stock.fleet import StockFleet

log = logging.getLogger(__name__)

EVERYWHERE = ("0.0.0.0", "::", "[::]")
"""Listen hosts that are no reachable address."""
MEMBERSHIP = "tandem.internal.v1.Membership"
END_S = 5.0
"""Longest time for ended streams, in seconds: a client must receive the reason before the server closes."""
SWITCH_S = 0.0005
"""Longest time for which a thread that renders or parses may hold the GIL while the loop waits for it, in seconds."""
GRACE_S = 0.5
"""Seconds for calls in flight when a server stops."""


class Router(SignalledRole):
    """A started router."""

    def __init__(
        self,
        config: RouterConfig,
        addresses: Addresses,
        servers: Sequence[Server],
        http: "OpenAiServer | None",
        requests: Drain,
        discovery: Discovery,
        parts: AsyncExitStack,
        fleet: "StockFleet | None" = None,
    ) -> None:
        """Create the router; `parts` holds what `stop` closes."""
        self._fleet = fleet
        self.addresses = addresses
        self._config = config
        self._servers = servers
        self._http = http
        self._requests = requests
        self._discovery = discovery
        self._parts = parts

    @property
    def address(self) -> str:
        """Address of the gRPC server."""
        return self.addresses.grpc

    async def failed(self) -> TandemError:
        """Return the error when the HTTP server failed, or the sources of stock servers did."""
        parts = [part for part in (self._http, self._fleet) if part is not None]
        return await first_of(*(part.failed() for part in parts)) if parts else await super().failed()

    async def drain(self) -> None:
        """Refuse new requests, finish streams for `drain_s`, and end the rest with an error that says so."""
        self._requests.begin()
        for server in self._servers:
            await server.announce_stop()
        await self._discovery.withdraw()
        if not await self._requests.idle(self._config.drain_s):
            log.warning("ending %d requests that took longer than %g s", self._requests.end_all(), self._config.drain_s)
            await self._requests.idle(END_S)

    async def stop(self) -> None:
        await self._discovery.withdraw()
        await self._parts.aclose()


async def start_router(config: RouterConfig) -> Router:
    """Fetch and read the models' configs and tokenizers, serve and announce.

    Raises StartError.
    """
    sys.setswitchinterval(SWITCH_S)
    if config.http_port is not None:
        # Imported only where it is needed, and before the loop is watched: FastAPI stops the loop for a second.
        from router.frontend.http_app import open_http
    if config.epp_port is not None:
        with needing("epp_port"):
            from router.frontend.envoy.service import open_picker
    public, member = config.frontends()
    keys = ApiKeys(config.api_keys_file)
    further_terms()  # raises for one that cannot be loaded
    if config.fleet is not None:
        from router.stock.fleet import (  # imported late, because an unused import costs start time
            open_fleet,
            with_model,
        )

        config = await with_model(config)
    files = read_models(config, await fetch_models(config))
    async with AsyncExitStack() as parts:
        metrics, registry = MetricsServer(config.host, config), new_registry()
        parts.push_async_callback(metrics.close)
        discovery = await _open_discovery(config)
        parts.push_async_callback(discovery.close)
        incarnation = secrets.token_bytes(16)
        tenant_limits = TenantLimits(config, await _open_ledger(config, parts))
        parts.push_async_callback(tenant_limits.close)
        models = serve_models(config, files, tenant_limits, incarnation, member)
        for model in models:
            parts.push_async_callback(model.close)
        server, requests = _public_server(config, public, keys), Drain()
        registry.register(ClusterCollector(models, tenant_limits))
        router_metrics = RouterMetrics(registry)
        watch_loop().on_lag = router_metrics.loop_lag.observe
        records, tracing = RecordFile(config), Tracing(config)
        parts.push_async_callback(records.close)
        parts.push_async_callback(tracing.close)
        accounting = Accounting(_open_usage(config), router_metrics)
        parts.push_async_callback(accounting.close)
        arrivals = Arrivals(config, tenant_limits)
        observer = Observer(models, router_metrics, records, tracing, accounting)
        handler = RequestHandler(config, Preprocessor(config, models), tenant_limits, arrivals, observer.watch)
        queries = Queries(config, models, arrivals, observer)
        warming = Warming(config, models, arrivals, handler)
        inference = InferenceService(handler, queries, models, keys, config.id(), requests, records, arrivals, warming)
        inference.add_to(server.grpc)
        membership = MembershipService(
            models,
            config.id(),
            incarnation,
            config.worker_silence_s,
            lost := lambda model: router_metrics.workers_lost.add(1, model),
        )
        fleet = None
        if config.fleet is not None:
            fleet = open_fleet(config.fleet, models, config.worker_silence_s, lost)
            parts.push_async_callback(fleet.close)
        internal = server if config.internal_port is None else Server(member.credentials if member else None)
        pb_grpc.add_MembershipServicer_to_server(membership, internal.grpc)
        servers = [server] if internal is server else [server, internal]
        port = await server.start(config.host, config.port, [NAME, MEMBERSHIP] if internal is server else [NAME])
        parts.push_async_callback(server.stop, GRACE_S)
        await server.start_health(config.host, config)
        internal_port = port
        if config.internal_port is not None:
            internal_port = await internal.start(config.host, config.internal_port, [MEMBERSHIP], "internal_port")
            parts.push_async_callback(internal.stop, GRACE_S)
        picker = None
        if config.epp_port is not None:
            picker = await open_picker(
                config, config.epp_port, public, models, tenant_limits, arrivals, observer, keys, requests, parts
            )
            servers.append(picker.server)
        http = None
        if config.http_port is not None:
            http = await open_http(
                config,
                config.http_port,
                public,
                handler,
                queries,
                models,
                requests,
                keys,
                inference,
                arrivals,
                parts,
                registry,
            )
        await metrics.start(registry)
        for each in servers:
            await each.mark_serving(
                lambda: config.ready_without_workers or any(model.decode_workers() for model in models)
            )
        held = parts.pop_all()
    joined_at = f"{config.advertise_host or config.host}:{internal_port}"
    discovery.announce(RouterEntry(config.id(), joined_at, incarnation.hex()))
    addresses = Addresses(
        f"{config.host}:{port}",
        http.address if http else "",
        metrics.address,
        "" if internal is server else f"{config.host}:{internal_port}",
        picker=picker.address if picker is not None else "",
    )
    return Router(config, addresses, servers, http, requests, discovery, held, fleet)


def serve_models(
    config: RouterConfig,
    files: Sequence[ModelFiles],
    tenant_limits: TenantLimits,
    incarnation: bytes,
    trust: MemberIdentity | None = None,
) -> ModelRuntimes:
    """Create the model runtimes, each with a fleet and a queue; tenant limits count over all of them."""
    dispatchers: list[Dispatcher] = []

    def next_of_tenant() -> None:
        """Try all queues: a tenant at its max_running had a request end, and its next may wait for another model."""
        for dispatcher in dispatchers:
            if dispatcher.num_waiting:
                dispatcher.kick()

    several_wait = len(files) > 1 and any(
        policy.max_running is not None for policy in (*config.tenants.values(), config.default_tenant)
    )
    models = []
    for each in files:
        fleet = Fleet(config.id(), config.priors(), config.learn_rates, incarnation.hex()[:8])
        on_end = next_of_tenant if several_wait else _nothing
        dispatchers.append(Dispatcher(fleet, config, tenant_limits.tenants, on_end=on_end))
        worker_waits = Shares(config.max_queued, config.max_queued_per_tenant)
        models.append(ModelRuntime(each, fleet, dispatchers[-1], worker_waits, trust))
    return ModelRuntimes(models, config.default_model)


def _public_server(config: RouterConfig, credentials: Credentials | None, keys: ApiKeys) -> Server:
    interceptors = [KeyInterceptor(keys)] if keys.required else []
    return Server(credentials, interceptors, config.max_connection_s, config.max_body_mib << 20, is_public=True)


def _nothing() -> None:
    """Do nothing: this model's queue is tried anyway."""


async def _open_discovery(config: RouterConfig) -> Discovery:
    if config.redis_url and config.host in EVERYWHERE and not config.advertise_host:
        raise StartError("advertise_host", f"is needed with redis_url: other hosts cannot reach {config.host!r}")
    discovery = open_discovery(config.redis_url, config.cluster_name)
    await discovery.start()
    return discovery


def _open_usage(config: RouterConfig) -> UsageLedger:
    """Return the usage ledger.

    Raises StartError.
    """
    if config.usage_ledger is None:
        return MemoryLedger(USAGE_DAYS)
    if config.usage_ledger != "redis":
        return FileLedger(config.usage_ledger, USAGE_DAYS)
    if not config.redis_url:
        raise StartError("usage_ledger", "needs redis_url")
    from router.redis_usage import RedisUsage

    return RedisUsage(config.redis_url, config.cluster_name, USAGE_DAYS)


async def _open_ledger(config: RouterConfig, parts: AsyncExitStack) -> "RedisLedger | None":
    """Open the shared quota ledger where there is a Redis."""
    if not config.redis_url:
        return None
    from router.admission.limits.redis_quota import (
        RedisLedger,  # imported late, because an unused import costs start time
    )

    ledger = RedisLedger(config.redis_url, config.cluster_name)
    parts.push_async_callback(ledger.close)
    await ledger.start()
    return ledger
