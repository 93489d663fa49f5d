"""A worker's side of Membership: one stream to every router, for as long as the worker lives."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from cluster.errors import Incompatible, TandemError, from_rpc_error
from cluster.rpc import channel
from engine.messages import CacheChanged, Load, TakeSnapshot
from engine.pool import Stored
from engine.worker.engine_client import EngineClient
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

RETRY_S = 0.2
MAX_BACKLOG = 4096
"""Messages a router may lag behind; then the stream is dropped, and the next one begins with a snapshot."""


async def stay_joined(router: str, hello: pb.Hello, engine: EngineClient) -> TandemError:
    """Join `router` again and again. Returns only when it says that this worker does not fit."""
    async with channel(router) as link:
        while True:
            try:
                await _join(pb_grpc.MembershipStub(link), hello, engine)
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                if isinstance(failure, Incompatible):
                    return failure
                log.info("not joined to %s: %s", router, failure)
            await asyncio.sleep(RETRY_S)


async def _join(stub: pb_grpc.MembershipStub, hello: pb.Hello, engine: EngineClient) -> None:
    backlog: asyncio.Queue[CacheChanged | Load] = asyncio.Queue(MAX_BACKLOG)
    overflow = asyncio.Event()

    def watch(message: CacheChanged | Load) -> None:
        try:
            backlog.put_nowait(message)
        except asyncio.QueueFull:
            overflow.set()

    async def outgoing() -> AsyncIterator[pb.WorkerMessage]:
        yield pb.WorkerMessage(hello=hello)
        engine.send(TakeSnapshot())
        synchronised = False
        while not overflow.is_set():
            message = await backlog.get()
            if isinstance(message, Load):
                yield pb.WorkerMessage(load=load_report(message))
            elif synchronised or message.snapshot:
                synchronised = True
                yield pb.WorkerMessage(cache=cache_events(message))

    with engine.watching(watch):
        call = stub.Join(outgoing())
        try:
            async for answer in call:
                if answer.HasField("resync"):
                    engine.send(TakeSnapshot())
        finally:
            call.cancel()  # when the router ended it, `outgoing` would wait for its next message for good


def load_report(load: Load) -> pb.LoadReport:
    return pb.LoadReport(
        step=load.step,
        running=load.running,
        loans=load.loans,
        queued_loans=load.queued_loans,
        queued_prefill_tokens=load.queued_prefill_tokens,
        available_blocks=load.available_blocks,
        num_blocks=load.num_blocks,
        placements_seen=load.placements_seen,
        preempted=load.preempted,
        preemptions=load.preemptions,
    )


def cache_events(changed: CacheChanged) -> pb.CacheEvents:
    events = [
        pb.CacheEvent(parent=event.parent, stored=b"".join(event.keys))
        if isinstance(event, Stored)
        else pb.CacheEvent(removed=b"".join(event.keys))
        for event in changed.events
    ]
    return pb.CacheEvents(sequence=changed.sequence, events=events, snapshot=changed.snapshot)
