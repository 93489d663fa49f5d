"""Fetches of items' blobs from preprocessors, for an engine that asks for them."""

import asyncio
import logging
from typing import Protocol

import grpc

from cluster.error_status import from_rpc_error
from cluster.errors import ServiceError
from cluster.rpc import Channels
from cluster.tls import TlsIdentity
from engine.items import Item
from engine.messages.from_engine import ItemsWanted
from engine.messages.to_engine import ItemsFetched, ToEngine
from protos import preprocess_pb2 as pb
from protos import preprocess_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)
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
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, wanted: ItemsWanted) -> None:
        """Fetch what the engine wants, in the background."""
        task = asyncio.ensure_future(self._fetch(wanted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End all fetches."""
        for task in self._tasks:
            task.cancel()

    async def _fetch(self, wanted: ItemsWanted) -> None:
        blobs: dict[bytes, bytes] = {}
        failure = ""
        try:
            for address in {item.address for item in wanted.items}:
                blobs |= await self._from(address, [item for item in wanted.items if item.address == address])
        except ServiceError as error:
            failure = f"tensors of the request's media: {error}"
            log.warning("fetch for %s failed: %s", wanted.request_id, failure)
        answer = ItemsFetched(wanted.request_id, wanted.choice, tuple(blobs.items()) if not failure else (), failure)
        self._engine.send(answer)

    async def _from(self, address: str, items: list[Item]) -> dict[bytes, bytes]:
        """Return the blobs of items that one preprocessor has, by identifier.

        Raises ServiceError.
        """
        blobs = {item.identifier: bytearray() for item in items}
        request = pb.FetchRequest(identifiers=list(blobs))
        missing = set(blobs)
        try:
            with self._channels.using(address) as channel:
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
