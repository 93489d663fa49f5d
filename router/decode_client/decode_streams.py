"""Streams to all decode workers, each opened with the first report of its worker."""

import asyncio
import functools
from contextlib import ExitStack

import grpc

from cluster.errors import Unavailable
from cluster.rpc import Channels
from cluster.tls import TlsIdentity
from router.decode_client.decode_stream import DecodeStream
from router.placement.fleet import Fleet
from router.placement.worker_records import Worker

CONNECT_S = 3.0
"""Seconds for a connection. gRPC's default is 20 s, while the request could run elsewhere."""


class DecodeStreams:
    """Streams by membership: a worker that joins again gets a new one."""

    def __init__(self, fleet: Fleet, trust: TlsIdentity | None = None) -> None:
        self._fleet = fleet
        self._links: dict[Worker, DecodeStream] = {}
        self._channels = Channels(trust)

    def to(self, worker: Worker) -> DecodeStream:
        """Return an unbroken stream to `worker`.

        It breaks when the worker falls silent.
        """
        link = self._links.get(worker)
        if link is None or link.broken:
            self._let_go()
            held = ExitStack()
            to_worker = held.enter_context(self._channels.using(worker.hello.address))
            link = self._links[worker] = DecodeStream(to_worker, worker.worker_id, held.close)
            silent = Unavailable(f"decode worker {worker.worker_id} fell silent")
            fell_silent = functools.partial(link.break_off, silent)
            worker.on_lost.add(fell_silent)
            held.callback(worker.on_lost.discard, fell_silent)
            held.callback(asyncio.ensure_future(_connected(to_worker, link, worker)).cancel)
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


async def _connected(channel: grpc.aio.Channel, link: DecodeStream, worker: Worker) -> None:
    """Break a stream that takes too long to connect."""
    try:
        async with asyncio.timeout(CONNECT_S):
            await channel.channel_ready()
        link.connected = True
    except TimeoutError:
        where = f"{worker.worker_id} at {worker.hello.address}"
        link.break_off(Unavailable(f"no connection to decode worker {where} within {CONNECT_S:g} s"))
