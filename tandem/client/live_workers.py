"""Workers of a live cluster: found by the router's status, and called directly."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from cluster.errors import InvalidRequest
from cluster.network.error_status import from_rpc_error
from cluster.network.rpc import channel
from cluster.network.tls import TlsIdentity
from protos import inference_pb2 as public_pb
from protos import membership_pb2_grpc as pb_grpc
from tandem.client.client import Client

CALL_S = 10.0
"""Longest wait for a worker's answer, in seconds."""
Reply = TypeVar("Reply")


class LiveWorkers:
    """Workers that are reached directly, as members; the operator's key opens the router's status."""

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
        workers = [
            worker
            for model in models
            if self._model in ("", model.name)
            for worker in model.workers
            if worker.has_reported
        ]
        return sorted(workers, key=lambda worker: (worker.role, worker.worker_id))

    async def worker(self, worker_id: str, field: str) -> public_pb.WorkerStatus:
        """Return a worker.

        Raises InvalidRequest that names `field` and the workers that there are.
        """
        workers = await self.workers()
        for worker in workers:
            if worker.worker_id == worker_id:
                return worker
        known = ", ".join(worker.worker_id for worker in workers) or "none"
        raise InvalidRequest(field, f"unknown worker {worker_id!r}; known are {known}")

    async def call(self, worker: public_pb.WorkerStatus, call: Callable[[Any], Awaitable[Reply]]) -> Reply:
        """Return what a call of the worker's `Worker` service answers.

        Raises ServiceError.
        """
        async with channel(worker.address, self._member) as link:
            try:
                return await call(pb_grpc.WorkerStub(link))
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None
