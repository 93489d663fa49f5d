"""A cluster, and a router of the test that observes what a peer must know to call its workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from cluster.errors import ServiceError, Unavailable
from cluster.network.error_status import from_rpc_error
from protos import decode_pb2, membership_pb2, membership_pb2_grpc
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from router.decode_client.decode_streams import DecodeStream
from tandem.local.local_cluster import RoleProcess

VOCAB = 1000
CONTEXT = 100_000
POOL_TOKENS = 8192
"""1 MiB of the sim engine's blocks."""
BLOCK = 16
MALFORMED = b"\x0a\xff\xff\xff\xff\x0fnot a message"
"""Bytes that no protobuf parser takes."""
GOOD = list(range(1, 4 * BLOCK + 2))


class OverhearingRouter(membership_pb2_grpc.MembershipServicer):
    """A router that only listens; it has no use for what its connections bring."""

    def __init__(self) -> None:
        self.hellos: dict[str, membership_pb2.Hello] = {}
        self.complete = asyncio.Event()
        """Both workers have joined."""

    async def Join(  # noqa: N802
        self, request_iterator: AsyncIterator[membership_pb2.WorkerMessage], context: Any
    ) -> AsyncIterator[membership_pb2.RouterMessage]:
        with ExitStack() as held:
            async for message in request_iterator:
                if message.HasField("hello"):
                    self.hellos[message.hello.worker_id] = message.hello
                    if len(self.hellos) == 2:
                        self.complete.set()
                    welcome = membership_pb2.Welcome(router_id="overhearing", stream_key=message.hello.incarnation)
                    yield membership_pb2.RouterMessage(welcome=welcome)
                    held.callback(connection(message.hello, welcome.stream_key).break_off, Unavailable("over"))


def connection(hello: membership_pb2.Hello, key: bytes = b"") -> DecodeStream:
    """Connect to a worker as a router does."""
    return DecodeStream(hello.stream_address, key, hello.worker_id, lambda: None, lambda _: None, None)


async def decode(hello: membership_pb2.Hello, request: decode_pb2.DecodeRequest) -> list[pb.GenerateResponse]:
    """Place a request on a worker; return its messages. Raises the ServiceError that ended it."""
    link = connection(hello)
    try:
        return [
            pb.GenerateResponse.FromString(message)
            async for messages in link.generate(request, 60.0)
            for message in messages
        ]
    finally:
        link.break_off(Unavailable("over"))


@dataclass
class Site:
    """The running cluster, and what its workers said of themselves."""

    router: RoleProcess
    workers: list[RoleProcess]
    model: Path
    hellos: dict[str, membership_pb2.Hello]
    links: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    def link(self, address: str) -> grpc.aio.Channel:
        """One channel per process, without limits on what may be sent."""
        if address not in self.links:
            options = [("grpc.max_send_message_length", -1)]
            self.links[address] = grpc.aio.insecure_channel(address, options=options)
        return self.links[address]

    @property
    def prefill(self) -> membership_pb2.Hello:
        return self.hellos["prefill-0"]

    @property
    def decode(self) -> membership_pb2.Hello:
        return self.hellos["decode-0"]


async def refusal(call: Any, under_way: bool = False) -> ServiceError:
    """The typed error that a call ends with. Fails when it hangs, or when it succeeds."""
    try:
        async with asyncio.timeout(10):
            if under_way:
                while await call.read() is not grpc.aio.EOF:
                    pass
            elif hasattr(call, "__aiter__"):
                async for _ in call:
                    pass
            else:
                await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call succeeded")


def generate(site: Site, **fields: Any) -> Any:
    return pb_grpc.InferenceStub(site.link(site.router.address)).Generate(pb.GenerateRequest(**fields), timeout=10)
