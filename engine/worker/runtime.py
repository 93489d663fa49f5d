"""What both roles are made of: an engine process, a gRPC server, and membership in every router's cluster."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from cluster.errors import TandemError
from cluster.rpc import Server
from engine.messages import Ready
from engine.model_dir import ModelDir
from engine.worker.assembly import EngineSpec
from engine.worker.audit_service import AuditService
from engine.worker.child_engine import ChildEngine
from engine.worker.config import Role, WorkerConfig
from engine.worker.engine_client import EngineClient, EngineHost
from engine.worker.joining import stay_joined
from engine.worker.loan_stream import Lenders
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc

ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a service of a worker may use."""

    config: WorkerConfig
    role: Role
    worker_id: str
    incarnation: bytes
    """Drawn at start: a restarted worker at the same address is another one."""
    model_dir: ModelDir
    engine: EngineClient
    ready: Ready
    lenders: Lenders


AddServices = Callable[[Server, WorkerContext], list[str]]
"""Adds a role's services to the server; their full names."""


class Worker:
    """A started worker."""

    def __init__(self, context: WorkerContext, server: Server, address: str) -> None:
        self.address = address
        self._context = context
        self._server = server
        hello = _hello(context, address)
        self._joins: list[asyncio.Future[TandemError]] = [
            asyncio.ensure_future(stay_joined(router, hello, context.engine)) for router in context.config.routers
        ]

    async def failed(self) -> TandemError:
        """The engine died, or a router says that this worker does not belong to it."""
        causes: list[asyncio.Future[TandemError]] = [self._context.engine.died, *self._joins]
        done, _ = await asyncio.wait(causes, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def stop(self) -> None:
        for join in self._joins:
            join.cancel()
        await self._server.stop(grace_s=0.5)
        await self._context.engine.stop()


async def start_worker(
    config: WorkerConfig,
    role: Role,
    add_services: AddServices,
    host_engine: Callable[[EngineSpec], EngineHost] = ChildEngine,
) -> Worker:
    """Load the model, serve, join. Raises StartError."""
    model_dir = ModelDir.open(config.model)
    worker_id, incarnation = config.id_for(role), secrets.token_bytes(16)
    spec = EngineSpec(config, role, agent_name=f"{worker_id}-{incarnation.hex()}")
    engine = EngineClient(host_engine(spec))
    ready = await engine.start()
    lenders = Lenders(engine, ready.model_fingerprint, ready.block_tokens, config.peer_silence_s)
    context = WorkerContext(config, role, worker_id, incarnation, model_dir, engine, ready, lenders)
    try:
        server = Server()
        pb_grpc.add_WorkerServicer_to_server(AuditService(worker_id, engine), server.grpc)
        services = ["tandem.internal.v1.Worker", *add_services(server, context)]
        port = await server.start(config.host, config.port, services)
        await server.mark_serving()
    except BaseException:
        await engine.stop()
        raise
    return Worker(context, server, f"{config.advertise_host or config.host}:{port}")


def _hello(context: WorkerContext, address: str) -> pb.Hello:
    ready = context.ready
    return pb.Hello(
        worker_id=context.worker_id,
        incarnation=context.incarnation,
        role=ROLES[context.role],
        address=address,
        model=context.model_dir.name,
        model_fingerprint=ready.model_fingerprint,
        config_fingerprint=context.model_dir.config_fingerprint(),
        block_tokens=ready.block_tokens,
        num_blocks=ready.num_blocks,
        block_bytes=ready.block_bytes,
        max_context_tokens=ready.max_context_tokens,
        transport=ready.transport,
        lends=True,
        reserve_output_tokens=context.config.reserve_output_tokens,
    )
