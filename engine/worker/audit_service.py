"""The Worker service: lets operators and tests see that no block is lost, and take the worker out of service."""

from collections.abc import Callable
from typing import Any

from engine.worker.engine_client import EngineClient
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc


class AuditService(pb_grpc.WorkerServicer):
    def __init__(self, worker_id: str, engine: EngineClient, drain: Callable[[], tuple[int, int]]) -> None:
        """`drain` makes the worker begin to leave; the requests and loans under way."""
        self._worker_id = worker_id
        self._engine = engine
        self._drain = drain

    async def Audit(self, request: pb.AuditRequest, context: Any) -> pb.AuditReport:
        books = await self._engine.audit()
        return pb.AuditReport(
            worker_id=self._worker_id,
            fault=books.fault,
            held_blocks=books.held_blocks,
            reserved_blocks=books.reserved_blocks,
            quarantined_blocks=books.quarantined_blocks,
            requests=books.sequences,
            loans=books.loans,
        )

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:
        requests, loans = self._drain()
        return pb.DrainReply(worker_id=self._worker_id, requests=requests, loans=loans)
