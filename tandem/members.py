"""Waits for workers to join a router, as its launcher: with the certificate of a member, and no API key."""

import asyncio
import time

import grpc

from cluster.errors import Unavailable, from_rpc_error
from cluster.rpc import channel
from cluster.tls import Trust
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc

POLL_S = 0.02


async def await_members(address: str, trust: Trust | None, num_prefill: int, num_decode: int, timeout_s: float) -> None:
    """`address` is where workers join. Raises Unavailable after `timeout_s`, and what else the router says."""
    give_up_at = time.monotonic() + timeout_s
    async with channel(address, trust) as link:
        stub = pb_grpc.MembershipStub(link)
        while True:
            try:
                there = await stub.Members(pb.MembersRequest(), timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None
            if there.prefill_workers >= num_prefill and there.decode_workers >= num_decode:
                return
            if time.monotonic() > give_up_at:
                joined = f"{there.prefill_workers} prefill and {there.decode_workers} decode workers"
                raise Unavailable(f"only {joined} joined within {timeout_s:g} s")
            await asyncio.sleep(POLL_S)
