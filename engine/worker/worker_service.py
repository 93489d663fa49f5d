"""The Worker service: audit of blocks, drain and role switch, for operators and tests; weights, for new workers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from cluster.error_status import to_status
from cluster.errors import Incompatible, InvalidRequest, NotConfigured, ServiceError
from cluster.roles import ON_WIRE
from engine.process.engine_client import EngineClient
from engine.worker.role_switch import RoleSwitch
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc


class WorkerService(pb_grpc.WorkerServicer):
    def __init__(
        self,
        worker_id: str,
        engine: EngineClient,
        drain: Callable[[], tuple[int, int]],
        roles: RoleSwitch,
        weights: bytes | None,
    ) -> None:
        """Create the service.

        `drain` starts the drain and returns the requests and loans in flight. `weights` is the config fingerprint of
        the model whose weights the engine can lend, or None where it cannot.
        """
        self._weights = weights
        self._worker_id = worker_id
        self._engine = engine
        self._drain = drain
        self._roles = roles

    async def Audit(self, request: pb.AuditRequest, context: Any) -> pb.AuditReport:
        audited = await self._engine.audit()
        return pb.AuditReport(
            worker_id=self._worker_id,
            fault=audited.fault,
            held_blocks=audited.held_blocks,
            reserved_blocks=audited.reserved_blocks,
            quarantined_blocks=audited.quarantined_blocks,
            requests=audited.sequences,
            loans=audited.loans,
        )

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:
        requests, loans = self._drain()
        return pb.DrainReply(worker_id=self._worker_id, requests=requests, loans=loans)

    async def Weights(self, request: pb.WeightsRequest, context: Any) -> AsyncIterator[pb.WeightsReply]:
        """Lend the weights until the caller, or this process, ends the stream."""
        try:
            if self._weights is None:
                raise NotConfigured("only torch engines of one rank lend weights, over the transport nixl")
            if request.config_fingerprint != self._weights:
                raise Incompatible("this worker serves another model", "config_fingerprint")
            async with self._engine.lending_weights() as offered:
                files = [pb.WeightFile(**asdict(file)) for file in offered.files]
                fingerprint, endpoint = offered.fingerprint, offered.endpoint
                yield pb.WeightsReply(
                    worker_id=self._worker_id, files=files, fingerprint=fingerprint, endpoint=endpoint
                )
                await asyncio.shield(self._engine.died)  # a caller that leaves cancels this call
        except ServiceError as error:
            await context.abort_with_status(to_status(error))

    async def SwitchRole(self, request: pb.SwitchRoleRequest, context: Any) -> pb.SwitchRoleReply:
        """Switch the role; the switch completes even if the caller disconnects."""
        try:
            wanted = [role for role, number in ON_WIRE.items() if number == request.role]
            if not wanted:
                raise InvalidRequest("role", f"{request.role} is neither ROLE_PREFILL nor ROLE_DECODE")
            switching = asyncio.ensure_future(self._roles.to(wanted[0]))
            handed_over = await asyncio.shield(switching)
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
        return pb.SwitchRoleReply(worker_id=self._worker_id, role=request.role, handed_over=handed_over)
