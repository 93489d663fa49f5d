"""The gRPC service Preprocess, for routers and workers."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import grpc

from cluster.errors import Draining, InvalidRequest, ServiceError, UnknownModel
from cluster.fair_turns import FairTurns
from cluster.logs import request_id
from cluster.network.error_status import end_call
from cluster.process.life import Drain
from cluster.process.tasks import all_of
from engine.media import MediaInput, MediaKind
from kvcache.items import IDENTIFIER_BYTES
from preprocessor.blobs import BlobStore, Lease, Shares
from preprocessor.children import Children
from preprocessor.config import PreprocessorConfig
from preprocessor.fetching import Fetcher
from protos import inference_pb2, items_pb2
from protos import preprocess_pb2 as pb

log = logging.getLogger(__name__)

NAME = "tandem.internal.v1.Preprocess"
CHUNK_BYTES = 1 << 20
MAX_FILES_BYTES = 64 << 20
"""Most bytes of all files of a request."""
MAX_WAITING_BYTES = 1 << 30
"""Most bytes of files of all requests that are not yet processed."""
REQUEST_BYTES = 1 << 20
"""Bytes that a request counts at least, so that there are not too many."""
FETCHES, FETCHES_PER_TENANT = 64, 16
"""URLs that are fetched at a time, of all tenants and of one."""
MAX_IDENTIFIERS = 4096
"""Most blobs of one Fetch."""


def item_identifier(identifier: str, cache_salt: str) -> bytes:
    """Return the identifier of an item by its content and the salt of its request; 16 bytes."""
    content = identifier.encode()
    digest = blake2b(len(content).to_bytes(4, "little") + content, digest_size=IDENTIFIER_BYTES)
    digest.update(cache_salt.encode())
    return digest.digest()


def encoder_of(identifier: bytes, encoders: Sequence[str]) -> str:
    """Return the encode worker of an item, by rendezvous hashing; empty where there is none."""

    def weight(address: str) -> bytes:
        return blake2b(identifier, key=address.encode()[:64], digest_size=8).digest()

    return max(encoders, key=weight, default="")


class PreprocessService:
    """Service over the children of each model, registered by hand.

    gRPC keeps the message of a unary call until the call ends, which for Process would be as long as its request runs.
    So Process takes its message as a stream of one.
    """

    def __init__(
        self,
        config: PreprocessorConfig,
        models: Mapping[str, Children],
        fetcher: Fetcher,
        blobs: BlobStore,
        drain: Drain,
    ) -> None:
        """Create it; `models` by name, and `drain` holds the streams in flight."""
        self.address = ""
        """Address at which workers fetch blobs."""
        self.encoders = config.encoders
        """Addresses of encode workers."""
        self._config = config
        self._models = models
        self._fetcher = fetcher
        self._blobs = blobs
        self._drain = drain
        self._waiting = Shares(MAX_WAITING_BYTES, "files of requests that wait")
        self._fetch_turns = FairTurns(FETCHES, FETCHES_PER_TENANT)
        self.num_items = 0
        self.refusals: Counter[str] = Counter()
        """Number of refused requests by the name of the gRPC status code."""

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {
            "Process": grpc.stream_stream_rpc_method_handler(
                self.Process, pb.ProcessRequest.FromString, pb.ProcessReply.SerializeToString
            ),
            "Fetch": grpc.unary_stream_rpc_method_handler(
                self.Fetch, pb.FetchRequest.FromString, pb.FetchChunk.SerializeToString
            ),
            "Describe": grpc.unary_unary_rpc_method_handler(
                self.Describe, pb.DescribeRequest.FromString, pb.DescribeReply.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(NAME, handlers)])

    async def Process(self, requests: AsyncIterator[pb.ProcessRequest], context: Any) -> AsyncIterator[pb.ProcessReply]:
        over = asyncio.Event()
        with self._answering(context), self._drain.holding(over.set):
            if self._drain.draining:
                raise Draining("this preprocessor was told to stop")
            request = await anext(requests)
            request_id.set(request.request_id)
            lease = self._blobs.lease(request.tenant)
            try:
                yield await self._process(request, lease)
                del request  # and with it the files
                await over.wait()  # the caller ends the stream, which cancels this
            finally:
                lease.close()

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.FetchChunk]:
        with self._answering(context):
            if len(request.identifiers) > MAX_IDENTIFIERS:
                raise InvalidRequest("identifiers", f"{len(request.identifiers)} are more than {MAX_IDENTIFIERS}")
            for identifier, blob in self._blobs.read(request.identifiers):
                for start in range(0, max(1, len(blob)), CHUNK_BYTES):
                    end = start + CHUNK_BYTES
                    yield pb.FetchChunk(identifier=identifier, data=blob[start:end], last=end >= len(blob))

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        with self._answering(context):
            modalities = self._children(request.model).modalities
            return pb.DescribeReply(
                modalities=[
                    pb.Modality(
                        kind=kind,
                        placeholder=each.placeholder,
                        max_items=min(each.max_items or self._config.max_items, self._config.max_items),
                    )
                    for kind, each in modalities.items()
                ]
            )
        return pb.DescribeReply()

    @contextmanager
    def _answering(self, context: Any) -> Iterator[None]:
        """Give the call the status of a ServiceError that is raised within the block."""
        try:
            yield
        except ServiceError as error:
            self.refusals[error.code] += 1
            end_call(context, error)

    def _children(self, model: str) -> Children:
        if not model and len(self._models) == 1:
            return next(iter(self._models.values()))
        if (children := self._models.get(model)) is None:
            raise UnknownModel(f"no model {model!r} here; there are {', '.join(self._models)}", "model")
        return children

    async def _process(self, request: pb.ProcessRequest, lease: Lease) -> pb.ProcessReply:
        """Return the answer, whose blobs the lease keeps. Raises ServiceError."""
        children = self._children(request.model)
        kinds = self._check(request, children)
        tenant = request.tenant
        self._blobs.check_room(tenant)
        given = [len(media.data) or (self._config.max_item_mib << 20) for media in request.media]
        with self._waiting.using(tenant, REQUEST_BYTES + min(sum(given), MAX_FILES_BYTES)):
            files = await self._files(tenant, request.media)
            media = [MediaInput(kind, data) for kind, data in zip(kinds, files, strict=True)]
            done = await children.process(tenant, request.prompt_token_ids, media, request.thumbnails)
        self.num_items += len(done.items)
        reply = pb.ProcessReply(prompt_token_ids=done.token_ids, thumbnails=done.thumbnails)
        for item in done.items:
            identifier = item_identifier(item.identifier, request.cache_salt)
            lease.add(identifier, item.blob)
            reply.items.append(
                items_pb2.Item(
                    identifier=identifier,
                    offset=item.offset,
                    length=item.length,
                    details=item.details,
                    address=self.address,
                    encoder=encoder_of(identifier, self.encoders),
                )
            )
        return reply

    def _check(self, request: pb.ProcessRequest, children: Children) -> list[MediaKind]:
        """Return the kinds of the media. Raises InvalidRequest for what is wrong before any file is read."""
        media, most = request.media, self._config.max_items
        if not media:
            raise InvalidRequest("media", "the request has none")
        if len(media) > most:
            raise InvalidRequest("media", f"a request has at most {most} files, not {len(media)} (max_items)")
        kinds: list[MediaKind] = []
        for place, each in enumerate(media):
            kind: Any = each.kind
            if (modality := children.modalities.get(kind)) is None:
                known = ", ".join(children.modalities)
                raise InvalidRequest(f"media[{place}].kind", f"the model reads {known}, not {each.kind[:40]!r}")
            kinds.append(kind)
            if modality.max_items and kinds.count(kind) > modality.max_items:
                reason = f"the model takes at most {modality.max_items} of kind {kind} in one request"
                raise InvalidRequest(f"media[{place}]", reason)
            if not each.data and not each.url:
                raise InvalidRequest(f"media[{place}]", "has neither data nor url")
            if len(each.data) > self._config.max_item_mib << 20:
                largest = self._config.max_item_mib
                raise InvalidRequest(f"media[{place}]", f"the file has more than {largest} MiB (max_item_mib)")
        _check_total(len(each.data) for each in media)
        return kinds

    async def _files(self, tenant: str, media: Sequence[inference_pb2.Media]) -> list[bytes]:
        """Return the files, after fetching those of URLs. Raises InvalidRequest."""

        async def file_of(place: int, each: inference_pb2.Media) -> bytes:
            if each.WhichOneof("source") == "data":
                return each.data
            async with self._fetch_turns.turn(tenant):
                return await self._fetcher.fetch(each.url, f"media[{place}]")

        files = await all_of(file_of(place, each) for place, each in enumerate(media))
        if (place := next((place for place, file in enumerate(files) if not file), None)) is not None:
            raise InvalidRequest(f"media[{place}]", "the file is empty")
        _check_total(map(len, files))
        return files


def _check_total(sizes: Iterator[int]) -> None:
    if (total := sum(sizes)) > MAX_FILES_BYTES:
        raise InvalidRequest("media", f"all files have {total} bytes, at most {MAX_FILES_BYTES >> 20} MiB are taken")
