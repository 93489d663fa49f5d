"""The gRPC service of Envoy's external processing: each call is one HTTP exchange of a gateway.

Start of the endpoint picker's port.

Imported only where there is one: Envoy's messages are a package of their own.
"""

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from cluster.errors import Draining, ServiceError, StartError
from cluster.network.error_status import end_call
from cluster.network.rpc import MAX_MESSAGE_BYTES, Server
from cluster.network.tls import Credentials
from cluster.process.life import Drain
from cluster.process.tasks import Endable, Tasks
from router.admission.arrivals import Arrivals
from router.admission.limits.tenant_limits import TenantLimits
from router.config import RouterConfig
from router.frontend.envoy.exchange import (
    Action,
    Answer,
    Event,
    HttpExchange,
    PickWanted,
    ResponseBegan,
    ResponseBytes,
)
from router.frontend.envoy.picker import Pick, Picker
from router.models.model_runtimes import ModelRuntimes
from router.request_path.observation import Observer
from router.security.api_keys import ApiKeys

NAME = "envoy.service.ext_proc.v3.ExternalProcessor"


class EndpointPickerService:
    """gRPC service, registered by hand like the router's own."""

    def __init__(self, picker: Picker, drain: Drain, max_body_bytes: int) -> None:
        """Create it; `drain` holds the exchanges in flight."""
        self._picker = picker
        self._drain = drain
        self._max_body_bytes = max_body_bytes

    def add_to(self, server: grpc.aio.Server) -> None:
        process = grpc.stream_stream_rpc_method_handler(
            self.Process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(NAME, {"Process": process})])

    async def Process(self, _: Any, context: Any) -> None:
        """Serve one exchange until the gateway closes the call, or the request is refused."""
        stopped = Draining("this router was told to stop")
        if self._drain.draining:
            end_call(context, stopped)
            return
        with ExitStack() as held:
            call = _Call(self._picker, context, held, self._max_body_bytes)
            try:
                async with Endable() as block:
                    with self._drain.holding(lambda: block.end(stopped)):
                        await call.serve()
            except ServiceError as error:
                if error is not stopped or not call.is_picked:  # otherwise the gateway goes on without a picker
                    end_call(context, error)


class _Call:
    """One call; closing `held` ends its placement, which happens once in whatever way the exchange ends."""

    def __init__(self, picker: Picker, context: Any, held: ExitStack, max_body_bytes: int) -> None:
        self._picker = picker
        self._context = context
        self._held = held
        self._exchange = HttpExchange(max_body_bytes)
        self._wanted: PickWanted | None = None
        self._pick: Pick | None = None
        self.is_picked = False
        """Whether the gateway knows the endpoint."""

    async def serve(self) -> None:
        """Serve to the end. Raises InvalidRequest for a message at the wrong time."""
        while (message := await self._context.read()) is not grpc.aio.EOF:
            await self._perform(self._exchange.receive(message))
            if self._wanted is not None and not await self._picked(self._wanted):
                return

    async def _picked(self, wanted: PickWanted) -> bool:
        """Wait for the pick beside the gateway's messages; return whether the call goes on."""
        self._wanted = None
        async with Tasks() as tasks:
            picking = tasks.spawn(self._picker.pick(wanted, self._held))
            reading: asyncio.Task[Any] | None = None
            await asyncio.sleep(0)  # most picks need no more than this turn
            while not picking.done():
                if reading is None:
                    reading = tasks.spawn(self._context.read())
                await asyncio.wait((picking, reading), return_when=asyncio.FIRST_COMPLETED)
                if not picking.done():
                    if (message := reading.result()) is grpc.aio.EOF:
                        return False
                    reading = None
                    await self._perform(self._exchange.receive(message))
            try:
                self._pick = picking.result()
            except ServiceError as error:
                await self._perform(self._exchange.refused(self._picker.refusal(wanted, error)))
                return False
            await self._perform(self._exchange.picked(self._pick.endpoints, self._pick.body))
            self.is_picked, self._pick.body = True, None
            if reading is None:
                return True
            message = await reading
            if message is grpc.aio.EOF:
                return False
            await self._perform(self._exchange.receive(message))
            return True

    async def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Answer(message):
                    await self._context.write(message)
                case PickWanted():
                    self._wanted = action
                case ResponseBegan():
                    if self._pick is not None:
                        self._pick.answered(action)
                case ResponseBytes(body):
                    if self._pick is not None:
                        self._pick.heard(body)
                case Event.ENDED:
                    if self._pick is not None:
                        self._pick.ended()
                    self._held.close()
                    self._pick = None


GRACE_S = 0.5
"""Seconds for calls in flight when the server stops."""


@dataclass(frozen=True, slots=True)
class OpenPicker:
    """Endpoint picker that listens."""

    server: Server
    address: str


async def open_picker(
    config: RouterConfig,
    port: int,
    credentials: Credentials | None,
    models: ModelRuntimes,
    tenant_limits: TenantLimits,
    arrivals: Arrivals,
    observer: Observer,
    keys: ApiKeys,
    requests: Drain,
    parts: AsyncExitStack,
) -> OpenPicker:
    """Start listening; `parts` closes what was started.

    Raises StartError.
    """
    max_body_bytes = config.max_body_mib << 20
    if config.epp_tls and credentials is None:
        raise StartError("epp_tls", "needs tls_cert and tls_key, or tls_public_cert and tls_public_key")
    trust = credentials if config.epp_tls else None
    # Without a check of the gateway's own key: clients' keys are in the headers of their requests.
    server = Server(trust, (), config.max_connection_s, MAX_MESSAGE_BYTES + max_body_bytes, is_public=True)
    picker = Picker(config, models, tenant_limits, arrivals, observer, keys)
    EndpointPickerService(picker, requests, max_body_bytes).add_to(server.grpc)
    parts.push_async_callback(server.stop, GRACE_S)
    bound = await server.start(config.host, port, [NAME], "epp_port")
    return OpenPicker(server, f"{config.host}:{bound}")
