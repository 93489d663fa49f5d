"""Workers that joined a router, as its launcher sees them: with a member's certificate, and no API key."""

import asyncio
import time
from typing import Any

import grpc

from cluster.errors import Unavailable
from cluster.network.error_status import from_rpc_error
from cluster.network.rpc import channel
from cluster.network.tls import TlsIdentity
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc

POLL_S = 0.02


async def workers_at(address: str, trust: TlsIdentity | None, timeout_s: float) -> set[str]:
    """Return the addresses of the workers to which a router sends requests.

    Raises ServiceError.

    `address` is where workers join.
    """
    async with channel(address, trust) as link:
        try:
            loads = await pb_grpc.MembershipStub(link).Loads(pb.LoadsRequest(), timeout=timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
    workers = (worker for model in loads.models for worker in model.workers)
    return {worker.address for worker in workers if worker.has_reported and not worker.draining}


async def await_members(
    address: str, trust: TlsIdentity | None, num_prefill: int, num_decode: int, timeout_s: float
) -> None:
    """Wait until so many workers have joined.

    Raises Unavailable after `timeout_s`, and the router's own errors.
    """
    give_up_at = time.monotonic() + timeout_s
    async with channel(address, trust) as link:
        stub = pb_grpc.MembershipStub(link)
        while True:
            prefill, decode = await _ask(stub, timeout_s)
            if prefill >= num_prefill and decode >= num_decode:
                return
            if time.monotonic() > give_up_at:
                joined = f"{prefill} prefill and {decode} decode workers"
                raise Unavailable(f"only {joined} joined within {timeout_s:g} s")
            await asyncio.sleep(POLL_S)


async def _ask(stub: Any, timeout_s: float) -> tuple[int, int]:
    try:
        reply = await stub.Members(pb.MembersRequest(), timeout=timeout_s, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    return reply.prefill_workers, reply.decode_workers
