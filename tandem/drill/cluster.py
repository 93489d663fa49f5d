"""A live cluster in a drill: its workers by the router's status, and calls to the workers themselves."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequest
from protos import inference_pb2 as public_pb
from protos import membership_pb2 as pb
from tandem.client.live_workers import CALL_S, LiveWorkers

FAULTS = ("kill", "stop", "delay", "corrupt", "partition")


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """Strength of faults; each fault uses the options that it has."""

    seconds: float = 3.0
    delay_ms: float = 200.0
    blocks: int = 4
    """Blocks to corrupt."""
    front: bool = False
    """Whether a stop includes the worker's front."""


class DrillCluster(LiveWorkers):
    """Workers of a cluster in a drill."""

    async def shape(self) -> Counter[str]:
        """Return the number of workers that can take work, by role."""
        return Counter(worker.role for worker in await self.workers() if not (worker.draining or worker.failing))

    async def inject(self, fault: str, worker_id: str, options: FaultOptions, peer_id: str = "") -> None:
        """Inject a fault into a worker; a partition into both of its ends.

        Raises ServiceError: InvalidRequest that names the field, Forbidden where a worker takes no faults.
        """
        if fault not in FAULTS:
            raise InvalidRequest("fault", f"unknown fault {fault!r}; known are {', '.join(FAULTS)}")
        if bool(peer_id) != (fault == "partition"):
            raise InvalidRequest("peer", "must name the other worker of a partition, and be left out for other faults")
        ends = [(await self.worker(worker_id, "worker"), peer_id)]
        if fault == "partition":
            ends.append((await self.worker(peer_id, "peer"), worker_id))
        for worker, other_id in ends:
            await self.call(worker, _injection(_request(fault, options, other_id)))

    async def audit(self, worker: public_pb.WorkerStatus) -> pb.AuditReport:
        """Return a worker's audit.

        Raises ServiceError.
        """
        return await self.call(worker, lambda stub: stub.Audit(pb.AuditRequest(), timeout=CALL_S))


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
