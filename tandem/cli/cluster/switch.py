"""`tandem switch`: switch a worker's role."""

import grpc
from rich.console import Console

from cluster.errors import InvalidRequest
from cluster.network.error_status import from_rpc_error
from cluster.network.rpc import channel
from cluster.network.tls import TlsIdentity
from cluster.roles import ROLES
from planner.executors import switch_role
from protos import inference_pb2 as public_pb
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc

ASK_S = 10.0


async def switch_worker(console: Console, address: str, trust: TlsIdentity | None, worker_id: str, role: str) -> None:
    """Switch a worker.

    Raises ServiceError, and InvalidRequest for a switch that leaves a model without decode workers.

    `address` is where workers join a router.
    """
    if role not in ROLES:
        raise InvalidRequest("to", f"must be prefill or decode, not {role!r}")
    async with channel(address, trust) as link:
        try:
            loads = await pb_grpc.MembershipStub(link).Loads(pb.LoadsRequest(), timeout=ASK_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
    worker = _find(loads, worker_id, role)
    if worker.role == role:
        console.print(f"{worker_id} is a {role} worker already")
        return
    handed_over = await switch_role(worker.address, role, trust)
    went_on = f"; {handed_over} requests went on elsewhere" if handed_over else ""
    console.print(f"{worker_id} is a {role} worker now{went_on}")


def _find(loads: pb.LoadsReply, worker_id: str, role: str) -> public_pb.WorkerStatus:
    for model in loads.models:
        for worker in model.workers:
            if worker.worker_id == worker_id:
                others = [other for other in model.workers if other.role == "decode" and other is not worker]
                if role == "prefill" and not others:
                    raise InvalidRequest("worker", f"{worker_id!r} is the last decode worker of {model.name}")
                return worker
    known = ", ".join(worker.worker_id for model in loads.models for worker in model.workers) or "none"
    raise InvalidRequest("worker", f"unknown worker {worker_id!r}; known are {known}")
