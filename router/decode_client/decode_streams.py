"""Streams to all decode workers, each opened with the first report of its worker."""

import asyncio
import functools
from contextlib import ExitStack

import grpc

from cluster.errors import InvalidRequest, Unavailable
from cluster.network.rpc import Channels
from cluster.network.tls import MemberIdentity
from protos import membership_pb2
from router.decode_client.decode_stream import DecodeStream, GrpcDecodeStream
from router.decode_client.frame_decode_stream import CONNECT_S, FrameDecodeStream
from router.decode_client.inbox import Inbox
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import WorkerRecord


class DecodeStreams:
    """Streams by membership: a worker that joins again gets a new one."""

    def __init__(self, fleet: Fleet, trust: MemberIdentity | None = None) -> None:
        self._fleet = fleet
        self._trust = trust
        self._links: dict[WorkerRecord, DecodeStream] = {}
        self._channels = Channels(trust)

    def to(self, worker: WorkerRecord) -> DecodeStream:
        """Return an unbroken stream to `worker`.

        It breaks when the worker falls silent.
        """
        link = self._links.get(worker)
        if link is None or link.broken:
            link = self._opened(worker, None)
        return link

    def open(self, worker: WorkerRecord, inbox: Inbox) -> None:
        """Open the stream of a worker that has just joined at its `stream_address`; its events go into `inbox`.

        Where the address cannot be reached, the worker sends them on its call, and requests go over gRPC.
        """
        inbox.opens(CONNECT_S)
        self._opened(worker, inbox)

    def _opened(self, worker: WorkerRecord, inbox: Inbox | None) -> DecodeStream:
        self._let_go()
        held = ExitStack()
        link: DecodeStream
        if worker.stream_key:
            # Only the membership's own stream brings events. One that replaces it, for requests until the worker has
            # joined again, has no key.
            key, put = (b"", _no_event) if inbox is None else (worker.stream_key, inbox.put)
            address, name = worker.hello.stream_address, worker.worker_id
            link = FrameDecodeStream(address, key, name, held.close, put, self._trust)
            if inbox is not None:
                held.callback(_end_events, link, inbox)
        else:
            to_worker = held.enter_context(self._channels.using(worker.hello.address))
            link = GrpcDecodeStream(to_worker, worker.worker_id, held.close)
            held.callback(asyncio.ensure_future(_connected(to_worker, link, worker)).cancel)
        self._links[worker] = link
        silent = Unavailable(f"decode worker {worker.worker_id} fell silent")
        fell_silent = functools.partial(link.break_off, silent)
        worker.on_lost.add(fell_silent)
        held.callback(worker.on_lost.discard, fell_silent)
        return link

    def departed(self, address: str) -> None:
        """Drop the channel to the address of a departed worker, once nothing runs there."""
        self._let_go()
        self._channels.departed(address)

    def _let_go(self) -> None:
        """Drop streams to workers that left, once nothing runs there."""
        for worker, link in tuple(self._links.items()):
            if link.broken or (link.idle and self._fleet.worker(worker.worker_id) is not worker):
                link.break_off(Unavailable(f"decode worker {worker.worker_id} left"))
                del self._links[worker]


def _end_events(link: DecodeStream, inbox: Inbox) -> None:
    """End the events of a membership with the stream that brought them, or have them sent another way."""
    if link.connected:
        inbox.end(link.failure)
    else:
        inbox.put(membership_pb2.NoStream(reason=str(link.failure)))


def _no_event(event: object) -> None:
    raise InvalidRequest("frame", "has an event, on a stream without the key of a membership")


async def _connected(channel: grpc.aio.Channel, link: DecodeStream, worker: WorkerRecord) -> None:
    """Break a stream that takes too long to connect."""
    try:
        async with asyncio.timeout(CONNECT_S):
            await channel.channel_ready()
        link.connected = True
    except TimeoutError:
        where = f"{worker.worker_id} at {worker.hello.address}"
        link.break_off(Unavailable(f"no connection to decode worker {where} within {CONNECT_S:g} s"))
