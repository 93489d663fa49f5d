"""The gRPC service Encode, for the workers of a model."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from cluster.errors import Draining, Incompatible, InvalidRequest, ServiceError
from cluster.logs import request_id
from cluster.network.error_status import end_call
from cluster.network.rpc import Channels
from cluster.process.life import Drain
from cluster.process.tasks import Tasks, log_bugs
from encode_worker.child_encoder import ChildEncoder
from engine.media import Embeddings
from kvcache.item_messages import read_items
from kvcache.items import IDENTIFIER_BYTES, Item
from protos import encode_pb2 as pb
from protos import encode_pb2_grpc as pb_grpc
from worker.front.item_fetches import fetch_blobs

log = logging.getLogger(__name__)

NAME = "tandem.internal.v1.Encode"
CHUNK_BYTES = 1 << 20
MAX_ITEMS = 4096
"""Most items of one call."""


class _Known(NamedTuple):
    """Embeddings of an item, and their fingerprint, which is computed once."""

    embeddings: Embeddings
    fingerprint: bytes


class EncodeService(pb_grpc.EncodeServicer):
    """Service over one encoder, with the embeddings that it has computed."""

    def __init__(self, encoder: ChildEncoder, channels: Channels, memory_bytes: int, drain: Drain) -> None:
        """Create it; `channels` lead to preprocessors, `drain` holds the calls in flight."""
        self._encoder = encoder
        self._channels = channels
        self._memory_bytes = memory_bytes
        self._drain = drain
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        """Embeddings by identifier, the least recently used first."""
        self.num_bytes = 0
        """Bytes of all known embeddings."""
        self.num_computed = self.num_found = 0
        self.tasks = Tasks(log_bugs("an item could not be encoded"))
        self._computing: dict[bytes, asyncio.Task[_Known]] = {}
        """Items that are being encoded, so that several callers cost one computation."""

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> AsyncIterator[pb.EncodeChunk]:
        try:
            with self._drain.holding(lambda: None):  # an item ends soon by itself
                if self._drain.draining:
                    raise Draining("this encode worker was told to stop")
                request_id.set(request.request_id)
                for item in self._checked(request):
                    for chunk in _chunks(item.identifier, await self._embeddings(item)):
                        yield chunk
        except ServiceError as error:
            end_call(context, error)

    def _checked(self, request: pb.EncodeRequest) -> list[Item]:
        """Return the request's items. Raises ServiceError."""
        if request.model_fingerprint != self._encoder.fingerprint:
            raise Incompatible("weights or data type differ from the worker's", "model_fingerprint")
        if len(request.items) > MAX_ITEMS:
            raise InvalidRequest("items", f"{len(request.items)} are more than {MAX_ITEMS}")
        items = list(read_items(request.items))
        for place, item in enumerate(items):
            if len(item.identifier) != IDENTIFIER_BYTES or not item.length:
                raise InvalidRequest(f"items[{place}]", f"needs {IDENTIFIER_BYTES} bytes of identifier, and tokens")
        return items

    async def _embeddings(self, item: Item) -> _Known:
        """Return the embeddings of an item, computed at most once. Raises ServiceError."""
        if (known := self._known.get(item.identifier)) is not None:
            self.num_found += 1
            self._known.move_to_end(item.identifier)
            return known
        if (task := self._computing.get(item.identifier)) is None:
            task = self._computing[item.identifier] = self.tasks.spawn(self._compute(item))
            task.add_done_callback(lambda _: self._computing.pop(item.identifier))
        return await asyncio.shield(task)

    async def _compute(self, item: Item) -> _Known:
        blobs = await fetch_blobs(self._channels, item.address, [item])
        embeddings = await self._encoder.encode(item, blobs[item.identifier])
        self.num_computed += 1
        known = self._known[item.identifier] = _Known(embeddings, embeddings.fingerprint())
        self.num_bytes += len(embeddings.data)
        while self.num_bytes > self._memory_bytes and len(self._known) > 1:
            _, dropped = self._known.popitem(last=False)
            self.num_bytes -= len(dropped.embeddings.data)
        return known


def _chunks(identifier: bytes, known: _Known) -> list[pb.EncodeChunk]:
    """Return the messages with an item's embeddings."""
    embeddings, data = known.embeddings, known.embeddings.data
    chunks = [
        pb.EncodeChunk(identifier=identifier, data=data[start : start + CHUNK_BYTES])
        for start in range(0, max(1, len(data)), CHUNK_BYTES)
    ]
    last = chunks[-1]
    last.dtype, last.fingerprint = embeddings.dtype, known.fingerprint
    last.shape.extend(embeddings.shape)
    return chunks
