"""Runtime of a node above 0 of a worker: an engine process, and health for supervisors.

It joins no router: node 0 is the worker. Its engine process ends with node 0's, and another one then waits for the next
incarnation of node 0.
"""

import asyncio
import logging
from collections.abc import Sequence

from cluster.errors import StartError, TandemError
from cluster.network.rpc import Server
from cluster.network.tls import member_of
from cluster.process.life import Addresses
from cluster.process.loop_watch import watch_loop
from cluster.process.tasks import Tasks
from cluster.roles import Role
from engine.config import WorkerConfig
from engine.messages.from_engine import FromEngine, NodeLinked, StartFailed
from engine.process.front.engine_client import ChildEngine, EngineListener
from engine.process.spec import EngineSpec
from worker.runtime import with_local_files

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Seconds between the end of an engine process and the start of the next."""


class _Incarnation(EngineListener):
    """One engine process of this node."""

    def __init__(self, spec: EngineSpec) -> None:
        self.is_linked = False
        self.refusal: StartError | None = None
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.engine = ChildEngine(spec)
        self.engine.start(self)

    def on_messages(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, NodeLinked):
                self.is_linked = True
            elif isinstance(message, StartFailed):
                field, _, reason = message.reason.partition(": ")
                self.refusal = StartError(field, reason)

    def ended(self, how: str) -> None:
        if not self.over.done():
            self.over.set_result(how)


class HeadlessNode:
    """A started node."""

    def __init__(self, spec: EngineSpec, server: Server, address: str) -> None:
        self.addresses = Addresses(address)
        self._spec, self._server = spec, server
        self._present: _Incarnation | None = None
        self._tasks = Tasks()
        self._running = self._tasks.spawn(self._run())

    def ready(self) -> bool:
        """Whether the node is linked with node 0."""
        return self._present is not None and self._present.is_linked

    async def failed(self) -> TandemError:
        """Return the error when the node cannot run with its settings."""
        return await asyncio.shield(self._running)

    async def stop_requested(self) -> None:
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Report the stop; node 0 has the requests."""
        await self._server.announce_stop()

    async def stop(self) -> None:
        await self._tasks.close()
        if self._present is not None:
            await self._present.engine.stop()
        await self._server.stop(grace_s=0.5)

    async def _run(self) -> TandemError:
        while True:
            present = self._present = _Incarnation(self._spec)
            how = await present.over
            if present.refusal is not None:
                return present.refusal
            log.warning("%s; waiting for the next start of node 0", how)
            await asyncio.sleep(AGAIN_S)


async def start_headless(config: WorkerConfig, role: Role) -> HeadlessNode:
    """Fetch the model, serve health and run the engine process.

    Raises StartError.
    """
    watch_loop()
    config.kind.check(config, role)
    config = await with_local_files(config)
    member = member_of(config)
    server = Server(member.credentials if member else None)
    port = await server.start(config.host, config.port, [])
    await server.start_health(config.host, config)
    worker_id = config.id_for(role)
    node = HeadlessNode(
        EngineSpec(config, role, "", worker_id), server, f"{config.advertise_host or config.host}:{port}"
    )
    await server.mark_serving(node.ready)
    return node
