"""Runtime of a worker: an engine process, a gRPC server, and membership in every router's cluster.

Files of a worker's models, fetched before its engine opens them.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial

from cluster.discovery.discovery import Discovery
from cluster.discovery.open_discovery import open_discovery
from cluster.errors import Draining, TandemError
from cluster.metrics import MetricsServer, new_registry
from cluster.network.mux_stream import MuxServer
from cluster.network.rpc import PROTOCOL, Server
from cluster.network.tls import MemberIdentity, member_of
from cluster.process.life import Addresses, Drain
from cluster.process.loop_watch import watch_loop
from cluster.process.tasks import first_of, happens
from cluster.roles import ON_WIRE, Role
from engine.config import WorkerConfig
from engine.core_types import Pooler
from engine.errors import ModelRefused
from engine.messages.from_engine import Ready
from engine.messages.to_engine import DrainGroup
from engine.model.hub import LORA_FILES, fetch_beside
from engine.model.model_dir import ModelDir
from engine.model.page_cache import in_page_cache
from engine.process.front.engine_client import ChildEngine, EngineClient, EngineHost
from engine.process.spec import EngineSpec
from loans.peers.connection import VERSION as LOAN_VERSION
from loans.peers.connection import peer_of
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc
from protos.loans_pb2 import Holder
from worker.front.faults import Faults
from worker.front.item_fetches import ItemFetches
from worker.front.lent_loans import END_S, READABLE_S, LentLoans, empty
from worker.front.membership import NAME_TAKEN_S, Memberships, RouterStreams
from worker.front.worker_service import RoleSwitch, WorkerService
from worker.metrics import register

log = logging.getLogger(__name__)


PART_BYTES = 1 << 20
"""Bytes of a file in one message; gRPC takes 4 MiB by default."""


async def with_local_files(config: WorkerConfig) -> WorkerConfig:
    """Return the settings with local directories in place of repositories, after fetching these.

    Raises EngineStartError.
    """
    paths: dict[str, object] = {"model": await fetch_beside(config.model, config.kind.model_files)}
    if config.adapters:
        adapters = config.adapters.items()
        paths["adapters"] = {name: await fetch_beside(path, LORA_FILES, "adapters") for name, path in adapters}
    return config.model_copy(update=paths)


async def weights_source(config: WorkerConfig, model_dir: ModelDir) -> str:
    """Return where the engine reads weights from: disk or page cache; empty where it reads none itself.

    A directory without weights is left to the engine, which has more to say of a model that it refuses.
    """
    if not config.kind.reads_weight_files:
        return ""
    try:
        files = model_dir.weight_files()
    except ModelRefused:
        return ""
    return "page cache" if await asyncio.to_thread(in_page_cache, files) else "disk"


async def file_parts(model_dir: ModelDir) -> AsyncIterator[pb.ModelFilePart]:
    """Yield the files that a router reads of the model, in parts of at most PART_BYTES."""
    files = await asyncio.to_thread(model_dir.files_for_routers)
    for file in files:
        content, name = await asyncio.to_thread(file.read_bytes), file.relative_to(model_dir.path).as_posix()
        for start in range(0, max(1, len(content)), PART_BYTES):
            is_last = file is files[-1] and start + PART_BYTES >= len(content)
            yield pb.ModelFilePart(name=name, content=content[start : start + PART_BYTES], is_last=is_last)


MEET_S = 1.0
"""Seconds for which a worker waits for its first connections before it reports itself. One takes some 50 ms."""
SILENT_S = 5.0
"""Seconds without a report after which the engine counts as hung; it reports several times a second."""


@dataclass(frozen=True, slots=True)
class Start:
    """Account of a worker's start."""

    seconds: float
    """Seconds from its settings to a loaded model."""
    warm_up_s: float
    """Seconds of the engine's warm-up, which came after it."""
    weights_source: str
    """Source of its weights: disk or page cache; empty for an engine without weights."""

    def __str__(self) -> str:
        warmed = f", warmed in {self.warm_up_s:.1f} s" if self.warm_up_s else ""
        weights = f", weights from {self.weights_source}" if self.weights_source else ""
        return f"{self.seconds:.1f} s{warmed}{weights}"


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Parts of a worker that its services use."""

    config: WorkerConfig
    roles: RoleSwitch
    worker_id: str
    incarnation: bytes
    """Incarnation, drawn at start: a restarted worker at the same address has another one."""
    model_dir: ModelDir
    engine: EngineClient
    ready: Ready
    start: Start
    requests: Drain
    """Decode requests in flight."""
    loans: LentLoans
    faults: Faults
    streams: RouterStreams
    stream_address: str
    """Address at which routers connect for requests and events."""
    fetches: ItemFetches

    def check_taking(self) -> None:
        """Raise Draining when no new work is accepted."""
        if self.requests.draining:
            raise Draining(f"worker {self.worker_id} was told to stop")


ServeRequests = Callable[[WorkerContext], object]
"""Function that has the requests of routers' connections served."""


class WorkerRuntime:
    """A started worker."""

    def __init__(
        self,
        context: WorkerContext,
        server: Server,
        stream_server: MuxServer,
        address: str,
        discovery: Discovery,
        leaving: "StopRequest",
        metrics: MetricsServer,
        member: MemberIdentity | None,
    ) -> None:
        self.address = address
        self.addresses = Addresses(address, metrics=metrics.address, start=str(context.start))
        self._metrics = metrics
        self.context = context
        self._server = server
        self.stream_server = stream_server
        self._discovery = discovery
        self._leaving = leaving
        config = context.config
        if not config.routers and not config.redis_url:
            log.warning("neither routers nor redis_url is set: this worker joins no router")
        self._memberships = Memberships(
            _hello(context, address),
            context.engine,
            config.routers,
            discovery,
            lambda: context.requests.draining,
            context.streams,
            name_taken_s=config.drain_s + NAME_TAKEN_S,
            trust=member,
            meet=partial(_meet, context.engine),
            files=partial(file_parts, context.model_dir),
        )
        self._memberships.start()

        context.roles.joined(self._memberships, self._empty, self._resume)

    def ready(self) -> bool:
        """Whether routers may send work: a router is joined, the engine's loop runs, and no role switch is going on."""
        context = self.context
        joined = self._memberships.num_joined > 0 and not context.requests.draining
        return joined and context.engine.silent_s < SILENT_S

    @property
    def role(self) -> Role:
        return self.context.roles.role

    async def switch(self, role: Role) -> int:
        """Switch to `role`; return the number of requests handed over.

        Raises ServiceError.
        """
        return await self.context.roles.to(role)

    async def failed(self) -> TandemError:
        """Return the error when the engine died, or a router refuses this worker for good."""
        return await first_of(self.context.engine.failed(), self._memberships.failed())

    async def stop_requested(self) -> None:
        """Return when a stop was requested, of this worker or of another one of its data-parallel group."""
        await first_of(self._leaving.told.wait(), self.context.engine.group_drains.wait())

    async def drain(self) -> None:
        """Refuse new work, finish work for `drain_s`, hand over the rest, and stay readable while blocks are read.

        The whole data-parallel group drains. Until all of it is empty, its ranks need this one's steps.
        """
        engine, config = self.context.engine, self.context.config
        self._leaving.begin()
        if config.group:
            engine.send(DrainGroup(is_empty=False))
        await self._server.announce_stop()
        await self._empty()
        if config.group:
            engine.send(DrainGroup(is_empty=True))
            await happens(engine.group_is_over, config.drain_s + READABLE_S + END_S)

    async def _empty(self) -> int:
        """Drain without leaving; return the number of requests handed over."""
        requests, loans = self.context.requests, self.context.loans
        requests.begin()
        loans.begin()
        self._memberships.report_draining()
        return await empty(requests, loans, self.context.config.drain_s)

    def _resume(self) -> bool:
        """Accept work again; return False when a stop was requested."""
        if self._leaving.told.is_set():
            return False
        self.context.requests.resume()
        self.context.loans.resume()
        return True

    async def stop(self) -> None:
        await self._memberships.leave()
        await self._discovery.close()
        self.stream_server.close()
        await self._server.stop(grace_s=0.5)
        await self.context.roles.switches.close()
        await self._metrics.close()
        await self.context.engine.stop()
        await self.context.fetches.close()  # after the engine, which may want items until then


class StopRequest:
    """Request to stop, from whatever source."""

    def __init__(self, requests: Drain, loans: LentLoans) -> None:
        self._requests = requests
        self._loans = loans
        self.told = asyncio.Event()

    def begin(self) -> tuple[int, int]:
        """Refuse new work from now on; return the requests and loans in flight."""
        self._requests.begin()
        self._loans.begin()
        self.told.set()
        return self._requests.num_calls, self._loans.num_loans


async def start_worker(
    config: WorkerConfig,
    role: Role,
    serve_requests: ServeRequests,
    host_engine: Callable[[EngineSpec], EngineHost] = ChildEngine,
) -> WorkerRuntime:
    """Fetch and load the model, serve and join.

    Raises StartError.
    """
    watch_loop()
    began_at = time.monotonic()
    config = await with_local_files(config)
    model_dir = ModelDir.open(config.model)
    member = member_of(config)
    worker_id, incarnation = config.id_for(role), secrets.token_bytes(16)
    discovery = open_discovery(config.redis_url, config.cluster_name, config.routers)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(discovery.close)
        metrics, registry = MetricsServer(config.host, config), new_registry()
        undo.push_async_callback(metrics.close)
        await discovery.start()  # before the model is loaded, so that a wrong setting fails early
        weights = await weights_source(config, model_dir)
        engine = EngineClient(
            host_engine(EngineSpec(config, role, f"{worker_id}-{incarnation.hex()}", worker_id, incarnation))
        )
        ready = await engine.start()
        undo.push_async_callback(engine.stop)
        start = Start(time.monotonic() - began_at - ready.warm_up_s, ready.warm_up_s, weights)
        log.info("started in %s", start)
        fetches = ItemFetches(engine, member)
        undo.push_async_callback(fetches.close)
        engine.on_items_wanted = fetches.start
        requests, loans = Drain(), LentLoans(engine)
        say_role = register(
            registry, worker_id, role, model_dir.name, ready, lambda: engine.last_load, lambda: engine.last_kv
        )
        roles = RoleSwitch(role, config, engine, ready.gpu, say_role)
        faults = Faults(config, worker_id, engine)
        streams = RouterStreams()
        stream_server = MuxServer(streams.accept, member.credentials if member else None, faults.frame_delay_s)
        undo.callback(stream_server.close)
        stream_port = await stream_server.start(config.host, config.stream_port, "stream_port")
        stream_address = f"{config.advertise_host or config.host}:{stream_port}"
        context = WorkerContext(
            config,
            roles,
            worker_id,
            incarnation,
            model_dir,
            engine,
            ready,
            start,
            requests,
            loans,
            faults,
            streams,
            stream_address,
            fetches,
        )
        leaving = StopRequest(requests, loans)
        server = Server(member.credentials if member else None)  # all services of a worker are internal
        service = WorkerService(worker_id, engine, leaving.begin, roles, faults, ready)
        pb_grpc.add_WorkerServicer_to_server(service, server.grpc)
        serve_requests(context)
        port = await server.start(config.host, config.port, ["tandem.internal.v1.Worker"])
        undo.push_async_callback(server.stop, 0)
        await server.start_health(config.host, config)
        await metrics.start(registry)
        undo.pop_all()
    address = f"{config.advertise_host or config.host}:{port}"
    worker = WorkerRuntime(context, server, stream_server, address, discovery, leaving, metrics, member)
    await server.mark_serving(worker.ready)
    return worker


async def _meet(engine: EngineClient, peers: Sequence[Holder]) -> None:
    """Connect the engine to workers that a router names; those that take longer than MEET_S connect meanwhile."""
    with suppress(TimeoutError):
        async with asyncio.timeout(MEET_S):
            for failure in await engine.connect([peer_of(peer) for peer in peers]):
                log.info("no connection to %s", failure)


def _hello(context: WorkerContext, address: str) -> pb.Hello:
    ready = context.ready
    return pb.Hello(
        worker_id=context.worker_id,
        incarnation=context.incarnation,
        role=ON_WIRE[context.roles.role],
        address=address,
        stream_address=context.stream_address,
        model=context.config.model_name or context.model_dir.name,
        model_fingerprint=ready.model_fingerprint,
        config_fingerprint=context.model_dir.config_fingerprint(),
        block_tokens=ready.block_tokens,
        num_blocks=ready.num_blocks,
        block_bytes=ready.block_bytes,
        max_context_tokens=ready.max_context_tokens,
        transport=ready.transport,
        lends=True,
        reserve_output_tokens=context.config.reserve_output_tokens,
        protocol=PROTOCOL,
        traffic_share=context.config.traffic_share or 0.0,
        adapters=[pb.Adapter(name=name, fingerprint=fingerprint) for name, fingerprint in ready.adapters],
        store=ready.store,
        start_seconds=context.start.seconds + context.start.warm_up_s,
        weights_source=context.start.weights_source,
        resumes_at_boundaries=ready.resumes_at_boundaries,
        reads_media=ready.reads_media,
        revision=context.model_dir.revision(ready.revision),
        group=context.config.group,
        group_rank=context.config.data_parallel_rank,
        pooler=None if ready.pooler is None else _pooler(ready.pooler),
        loan_address=ready.loan_address,
        loan_version=LOAN_VERSION,
    )


def _pooler(pooler: Pooler) -> pb.Pooler:
    return pb.Pooler(
        of_last_token=pooler.pooling == "last",
        normalize=pooler.normalize,
        dimensions=pooler.dimensions,
        classifies=pooler.classifies,
    )
