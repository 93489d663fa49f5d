"""Fetches for an engine of what its model's encoder makes of items, or of the tensors that the encoder reads.

Embeddings come from the items' encode workers. Where one does not answer, blobs come from the preprocessors instead.
"""

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import grpc

from cluster.errors import InvalidRequest, ServiceError
from cluster.network.error_status import from_rpc_error
from cluster.network.rpc import Channels
from cluster.network.tls import TlsIdentity
from cluster.process.tasks import Tasks
from engine.media import Embeddings
from engine.messages.from_engine import ItemsWanted
from engine.messages.to_engine import ItemsFetched, ToEngine
from kvcache.item_messages import item_messages
from kvcache.items import Item
from protos import encode_pb2, encode_pb2_grpc
from protos import preprocess_pb2 as pb
from protos import preprocess_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)
ENCODE_S = 10.0
"""Seconds after which an encode worker is not waited for; the engine encodes itself."""
AVOID_S = 5.0
"""Seconds for which an encode worker that failed is not asked again."""
FETCH_S = 10.0
"""Seconds after which a fetch is given up; its request is placed again."""


class Recipient(Protocol):
    """Engine that asked."""

    def send(self, *messages: ToEngine) -> None:
        """Send it messages."""


class ItemFetches:
    """Fetches for one engine; each answer is one ItemsFetched."""

    def __init__(self, engine: Recipient, trust: TlsIdentity | None = None) -> None:
        self._engine = engine
        self._channels = Channels(trust)
        self._tasks = Tasks("a fetch for the engine was lost")
        self.avoided: dict[str, float] = {}
        """Encode workers that failed, and until when they are not asked, in seconds of the monotonic clock."""

    def start(self, wanted: ItemsWanted) -> None:
        """Fetch what the engine wants, in the background."""
        self._tasks.spawn(self._fetch(wanted))

    async def close(self) -> None:
        """End all fetches."""
        await self._tasks.close()

    async def _fetch(self, wanted: ItemsWanted) -> None:
        blobs: dict[bytes, bytes] = {}
        embeddings = await self._embeddings(wanted)
        others = [item for item in wanted.items if item.identifier not in embeddings]
        try:
            for address in {item.address for item in others}:
                wanted_there = [item for item in others if item.address == address]
                blobs |= await fetch_blobs(self._channels, address, wanted_there)
        except ServiceError as error:
            failure = f"tensors of the request's media: {error}"
            log.warning("fetch for %s failed: %s", wanted.request_id, failure)
            answer = ItemsFetched(wanted.request_id, wanted.choice, failure=failure)
        else:
            found = tuple(blobs.items()), tuple(embeddings.items())
            answer = ItemsFetched(wanted.request_id, wanted.choice, *found)
        self._engine.send(answer)

    async def _embeddings(self, wanted: ItemsWanted) -> dict[bytes, Embeddings]:
        """Return the embeddings that encode workers give, by identifier."""
        found: dict[bytes, Embeddings] = {}
        now = time.monotonic()
        for address in {item.encoder for item in wanted.items if item.encoder and wanted.encoder_fingerprint}:
            if self.avoided.get(address, 0.0) > now:
                continue
            items = [item for item in wanted.items if item.encoder == address]
            try:
                found |= await self._encoded(address, items, wanted)
            except InvalidRequest as error:  # of these items: it may encode others
                log.info("encode worker %s refuses items of %s: %s", address, wanted.request_id, error)
            except ServiceError as error:
                self.avoided[address] = time.monotonic() + AVOID_S
                log.warning("encode worker %s is not asked for %g s: %s", address, AVOID_S, error)
        return found

    async def _encoded(self, address: str, items: list[Item], wanted: ItemsWanted) -> dict[bytes, Embeddings]:
        """Return the embeddings of items by one encode worker.

        Raises ServiceError.
        """
        request = encode_pb2.EncodeRequest(
            request_id=wanted.request_id,
            items=item_messages(items),
            model_fingerprint=wanted.encoder_fingerprint,
        )
        parts = {item.identifier: bytearray() for item in items}
        found: dict[bytes, Embeddings] = {}
        try:
            with self._channels.using(address) as channel:
                async for chunk in encode_pb2_grpc.EncodeStub(channel).Encode(request, timeout=ENCODE_S):
                    parts[chunk.identifier] += chunk.data
                    if chunk.dtype:
                        whole = Embeddings(chunk.dtype, tuple(chunk.shape), bytes(parts[chunk.identifier]))
                        if whole.fingerprint() != chunk.fingerprint:
                            raise ServiceError(f"embeddings of {chunk.identifier.hex()} arrived damaged")
                        found[chunk.identifier] = whole
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except KeyError as error:
            raise ServiceError(f"{address} sent an item that was not wanted") from error
        return found


async def fetch_blobs(channels: Channels, address: str, items: Sequence[Item]) -> dict[bytes, bytes]:
    """Return the blobs of items that one preprocessor has, by identifier.

    Raises ServiceError.
    """
    blobs = {item.identifier: bytearray() for item in items}
    request = pb.FetchRequest(identifiers=list(blobs))
    missing = set(blobs)
    try:
        with channels.using(address) as channel:
            async for chunk in pb_grpc.PreprocessStub(channel).Fetch(request, timeout=FETCH_S):
                blobs[chunk.identifier] += chunk.data
                if chunk.last:
                    missing.discard(chunk.identifier)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except KeyError as error:
        raise ServiceError(f"{address} sent a blob that was not wanted") from error
    if missing:
        raise ServiceError(f"{address} did not send {len(missing)} of {len(blobs)} blobs")
    return {identifier: bytes(blob) for identifier, blob in blobs.items()}
