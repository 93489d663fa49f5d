"""Connections to all workers, each opened when its worker has joined."""

import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from typing import Protocol

from cluster.errors import InvalidRequest, ServiceError, Unavailable
from cluster.network.tls import MemberIdentity
from protos import decode_pb2 as pb
from router.decode_client.decode_stream import CONNECT_S, DecodeStream
from router.decode_client.inbox import Inbox
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import WorkerRecord


class WorkerLink(Protocol):
    """Way of requests to one worker: DecodeStream has the meaning of its members."""

    failure: ServiceError | None

    @property
    def connected(self) -> bool: ...
    @property
    def broken(self) -> bool: ...
    @property
    def idle(self) -> bool: ...
    def generate(self, request: pb.DecodeRequest, timeout_s: float) -> AsyncGenerator[Sequence[bytes]]: ...
    def break_off(self, failure: ServiceError) -> None: ...


class DecodeStreams:
    """Connections by membership: a worker that joins again gets a new one."""

    def __init__(self, fleet: Fleet, trust: MemberIdentity | None = None) -> None:
        self._fleet = fleet
        self._trust = trust
        self._links: dict[WorkerRecord, WorkerLink] = {}

    def to(self, worker: WorkerRecord) -> "WorkerLink":
        """Return an unbroken connection to `worker`.

        It breaks when the worker falls silent. Raises Unavailable for a stock server that has left.
        """
        link = self._links.get(worker)
        if link is None or link.broken:
            if not worker.hello.stream_address:
                raise Unavailable(f"server {worker.worker_id} has left")
            link = self._opened(worker, None)
        return link

    def add(self, worker: WorkerRecord, link: "WorkerLink") -> None:
        """Add the link to a worker that has no stream_port: a stock server, or a simulated worker."""
        self._links[worker] = link

    def open(self, worker: WorkerRecord, inbox: Inbox) -> None:
        """Connect to a worker that has just joined; its events go into `inbox`, which ends with the connection."""
        inbox.opens(CONNECT_S)
        self._opened(worker, inbox)

    def let_go(self) -> None:
        """Drop connections to workers that left, once nothing runs there."""
        for worker, link in tuple(self._links.items()):
            if link.broken or (link.idle and self._fleet.worker(worker.worker_id) is not worker):
                link.break_off(Unavailable(f"worker {worker.worker_id} left"))
                del self._links[worker]

    def _opened(self, worker: WorkerRecord, inbox: Inbox | None) -> DecodeStream:
        self.let_go()
        held = ExitStack()
        # Only the membership's own connection brings events. One that replaces it, for requests until the worker has
        # joined again, has no key.
        key, put = (b"", _no_event) if inbox is None else (worker.stream_key, inbox.put)
        address, name = worker.hello.stream_address, worker.worker_id
        link = DecodeStream(address, key, name, held.close, put, self._trust)
        if inbox is not None:
            held.callback(lambda: inbox.end(link.failure))
        self._links[worker] = link
        fell_silent = functools.partial(link.break_off, Unavailable(f"worker {name} fell silent"))
        worker.on_lost.add(fell_silent)
        held.callback(worker.on_lost.discard, fell_silent)
        return link


def _no_event(event: object) -> None:
    raise InvalidRequest("frame", "has an event, on a connection without the key of a membership")
