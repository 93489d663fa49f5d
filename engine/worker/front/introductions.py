"""Connections between this worker and others before their first loan, by one call that connects both directions.

A worker that joins a router is told of workers with which it will likely exchange blocks. It calls `Meet` of each, so
that the other one connects, and then connects itself. Of both, KV memory and a Lend stream are connected. A worker that
cannot be met is met by the first loan.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

import grpc

from cluster.errors import Incompatible, ServiceError
from cluster.network.error_status import from_rpc_error
from engine.messages.from_engine import Ready
from engine.process.front.engine_client import EngineClient
from engine.worker.front.lender_streams import LenderStreams
from protos import lend_pb2 as pb
from protos import lend_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

MEET_S = 1.0
"""Seconds for which a worker waits for connections before it reports itself. One takes some 50 ms; those that take
longer are made meanwhile."""
GIVE_UP_S = 5.0
"""Seconds after which a call of another worker fails."""
MAX_STREAMS = 64
"""Streams to lenders beyond which this worker connects to no other in advance. In a larger fleet most pairs never meet,
and each connection costs both sides memory and descriptors."""


class Introductions:
    """This worker, as it meets others."""

    def __init__(self, engine: EngineClient, lenders: LenderStreams, ready: Ready, incarnation: bytes) -> None:
        self._engine = engine
        self._lenders = lenders
        self._ready = ready
        self._incarnation = incarnation
        self._meeting: dict[tuple[str, bytes], asyncio.Task[None]] = {}
        """Workers that were named to this one, by address and incarnation, until they are met or have failed."""

    async def meet(self, caller: pb.Holder, peers: Sequence[pb.Holder]) -> None:
        """Connect to workers, as `caller`; return when all are connected or have failed, or after MEET_S."""
        for peer in peers:
            key = peer.address, peer.incarnation
            if key not in self._meeting and not self._lenders.knows(peer):
                task = self._meeting[key] = asyncio.ensure_future(self._meet(caller, peer))
                task.add_done_callback(partial(self._met, key))
        if self._meeting:
            await asyncio.wait(self._meeting.values(), timeout=MEET_S)

    async def answer(self, request: pb.MeetRequest) -> pb.MeetReply:
        """Connect to a worker that calls.

        Raises Incompatible.
        """
        if request.incarnation != self._incarnation:
            raise Incompatible("does not match: another worker process listens at this address now", "incarnation")
        if request.model_fingerprint != self._ready.model_fingerprint:
            raise Incompatible("weights, layout or dtype differ from the caller's", "model_fingerprint")
        if self._lenders.num_streams < MAX_STREAMS:
            await self._connect(request.caller, request.endpoint)
        return pb.MeetReply(endpoint=self._ready.endpoint)

    async def close(self) -> None:
        """End calls in flight."""
        tasks = tuple(self._meeting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _met(self, key: tuple[str, bytes], _: "asyncio.Task[None]") -> None:
        del self._meeting[key]

    async def _meet(self, caller: pb.Holder, peer: pb.Holder) -> None:
        request = pb.MeetRequest(
            caller=caller,
            endpoint=self._ready.endpoint,
            incarnation=peer.incarnation,
            model_fingerprint=self._ready.model_fingerprint,
        )
        try:
            with self._lenders.channel(peer) as link:
                reply = await pb_grpc.LendStub(link).Meet(request, timeout=GIVE_UP_S)
            await self._connect(peer, reply.endpoint)
        except grpc.aio.AioRpcError as error:
            log.info("no connection to %s: %s", peer.worker_id, from_rpc_error(error))
        except ServiceError as error:
            log.info("no connection to %s: %s", peer.worker_id, error)

    async def _connect(self, peer: pb.Holder, endpoint: bytes) -> None:
        self._lenders.connect(peer)
        if failure := await self._engine.connect(endpoint):
            log.info("no connection to the memory of %s: %s", peer.worker_id, failure)
        else:
            log.info("connected to %s", peer.worker_id)
