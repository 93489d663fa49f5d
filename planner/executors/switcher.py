"""Executor that only switches roles, by a call to the worker, for clusters where it cannot start workers."""

import asyncio
from collections.abc import Mapping, Sequence

import grpc

from cluster.network.error_status import from_rpc_error
from cluster.network.rpc import channel
from cluster.network.tls import TlsIdentity
from cluster.roles import ON_WIRE, Role
from planner.executors.executor import Executor, ExecutorFailed
from protos import inference_pb2 as pb
from protos import membership_pb2, membership_pb2_grpc

TIMEOUT_S = 120.0
"""Seconds for all streams of a worker to end or be handed over."""


async def switch_role(address: str, role: Role, trust: TlsIdentity | None, timeout_s: float = TIMEOUT_S) -> int:
    """Switch the worker at `address` to `role`; return the number of requests it handed over.

    Raises ServiceError.
    """
    async with channel(address, trust) as link:
        request = membership_pb2.SwitchRoleRequest(role=ON_WIRE[role])
        try:
            reply = await membership_pb2_grpc.WorkerStub(link).SwitchRole(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
    handed_over: int = reply.handed_over
    return handed_over


class Switcher(Executor):
    """Executor over a fixed number of workers, whose roles follow the load."""

    scales, switches = False, True

    def __init__(self, trust: TlsIdentity | None) -> None:
        self._trust = trust

    async def sizes(self) -> Mapping[Role, int]:
        return {}

    async def scale(self, role: Role, count: int) -> None:
        """Do nothing: the number of workers is fixed, and a larger desired size is a metric only."""

    async def switch(self, workers: Sequence[pb.WorkerStatus], role: Role) -> None:
        switching = (switch_role(worker.address, role, self._trust) for worker in workers)
        outcomes = await asyncio.gather(*switching, return_exceptions=True)
        failed = [
            f"{worker.worker_id}: {outcome}"
            for worker, outcome in zip(workers, outcomes, strict=True)
            if isinstance(outcome, BaseException)
        ]
        if failed:
            raise ExecutorFailed("; ".join(failed))
