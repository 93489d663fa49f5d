"""A live cluster in a drill: its workers by the router's status, and calls to the workers themselves."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from cluster.error_status import from_rpc_error
from cluster.errors import InvalidRequest
from cluster.rpc import channel
from cluster.tls import TlsIdentity
from protos import inference_pb2 as public_pb
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc
from tandem.client import Client

FAULTS = ("kill", "stop", "delay", "corrupt", "partition")
CALL_S = 10.0
"""Longest wait for a worker's answer, in seconds."""
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """Strength of faults; each fault uses the options that it has."""

    seconds: float = 3.0
    delay_ms: float = 200.0
    blocks: int = 4
    """Blocks to corrupt."""
    front: bool = False
    """Whether a stop includes the worker's front."""


class DrillCluster:
    """Workers of a cluster that are reached directly, as members; the operator's key opens the router's status."""

    def __init__(self, client: Client, member: TlsIdentity | None, model: str = "") -> None:
        """Create it for the workers of `model`; empty: for those of all models."""
        self._client = client
        self._member = member
        self._model = model

    async def workers(self) -> list[public_pb.WorkerStatus]:
        """Return the workers that have reported, decode workers first.

        Raises ServiceError.
        """
        models = (await self._client.cluster_status()).models
        found = [
            worker
            for model in models
            if self._model in ("", model.name)
            for worker in model.workers
            if worker.has_reported
        ]
        return sorted(found, key=lambda worker: (worker.role, worker.worker_id))

    async def shape(self) -> Counter[str]:
        """Return the number of workers that can take work, by role."""
        return Counter(worker.role for worker in await self.workers() if not (worker.draining or worker.failing))

    async def worker(self, worker_id: str, field: str) -> public_pb.WorkerStatus:
        """Return a worker.

        Raises InvalidRequest that names `field` and the workers that there are.
        """
        workers = await self.workers()
        for worker in workers:
            if worker.worker_id == worker_id:
                return worker
        known = ", ".join(worker.worker_id for worker in workers) or "none"
        raise InvalidRequest(field, f"{worker_id!r} is not there; there are {known}")

    async def inject(self, fault: str, worker_id: str, options: FaultOptions, peer_id: str = "") -> None:
        """Inject a fault into a worker; a partition into both of its ends.

        Raises ServiceError: InvalidRequest that names the field, Forbidden where a worker takes no faults.
        """
        if fault not in FAULTS:
            raise InvalidRequest("fault", f"{fault!r} is none of {', '.join(FAULTS)}")
        if bool(peer_id) != (fault == "partition"):
            raise InvalidRequest("peer", "is for a partition, which needs it")
        ends = [(await self.worker(worker_id, "worker"), peer_id)]
        if fault == "partition":
            ends.append((await self.worker(peer_id, "peer"), worker_id))
        for worker, other_id in ends:
            await self._call(worker, _injection(_request(fault, options, other_id)))

    async def audit(self, worker: public_pb.WorkerStatus) -> pb.AuditReport:
        """Return a worker's audit.

        Raises ServiceError.
        """
        return await self._call(worker, lambda stub: stub.Audit(pb.AuditRequest(), timeout=CALL_S))

    async def _call(self, worker: public_pb.WorkerStatus, call: Callable[[Any], Awaitable[Answer]]) -> Answer:
        async with channel(worker.address, self._member) as link:
            try:
                return await call(pb_grpc.WorkerStub(link))
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None


def _injection(request: pb.InjectRequest) -> Callable[[Any], Awaitable[object]]:
    return lambda stub: stub.Inject(request, timeout=CALL_S)


def _request(fault: str, options: FaultOptions, peer_id: str) -> pb.InjectRequest:
    match fault:
        case "kill":
            return pb.InjectRequest(kill=pb.KillFault())
        case "stop":
            return pb.InjectRequest(stop=pb.StopFault(seconds=options.seconds, front=options.front))
        case "delay":
            return pb.InjectRequest(delay=pb.DelayFault(seconds=options.seconds, delay_ms=options.delay_ms))
        case "corrupt":
            return pb.InjectRequest(corrupt=pb.CorruptFault(blocks=options.blocks, seconds=options.seconds))
        case _:
            return pb.InjectRequest(partition=pb.PartitionFault(seconds=options.seconds, peer=peer_id))
