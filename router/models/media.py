"""Pictures, sounds and videos of prompts, and the client of the preprocessors that make them ready."""

import contextlib
import logging
import re
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import grpc

from cluster.errors import DeadlineExceeded, InvalidRequest, Overloaded, ServiceError, Unavailable
from cluster.network.error_status import from_rpc_error
from cluster.network.rpc import Channels, media_channel
from cluster.network.tls import MemberIdentity
from engine.media import MAX_THUMBNAIL_BYTES, MAX_THUMBNAILS
from kvcache.item_messages import read_items
from kvcache.items import Item, items_fault
from protos import inference_pb2 as pb
from protos import preprocess_pb2, preprocess_pb2_grpc

log = logging.getLogger(__name__)

NAMES: Mapping[str, str] = {"image": "pictures", "audio": "sounds", "video": "videos"}
DESCRIBE_S = 10.0
"""Longest time for a preprocessor to say what a model reads, in seconds."""
KEPT_BYTES = 128 << 20
"""Bytes of media of a model's requests that are kept so that another preprocessor can take them over."""
KEY_BYTES = 64 << 10
"""Bytes of a request's first file that decide which preprocessor is asked first."""
_PLACE = re.compile(r"media\[(\d{1,6})\].*", re.DOTALL)


class MediaSource(NamedTuple):
    """One medium of a request."""

    medium: pb.Media
    field: str
    """Field of the request that has it."""


class MediumFacts(NamedTuple):
    """Facts of a medium that samples keep."""

    kind: str
    num_bytes: int
    """Size of the file; 0 where a URL was given."""


@dataclass(frozen=True, slots=True)
class ReadingContext:
    """Facts of a request that a preprocessor needs besides its prompt."""

    request_id: str
    cache_salt: str
    deadline: float
    """Deadline in seconds of the monotonic clock."""
    thumbnails: bool = False
    """Whether thumbnails of its pictures are wanted."""


def sources_of(request: pb.GenerateRequest) -> list[MediaSource]:
    """Return the media of a request, in order of appearance."""
    return [*sources_in(request.messages), *_beside_text(request)] if _may_have(request) else []


def _may_have(request: pb.GenerateRequest) -> bool:
    return bool(request.media) or any(message.parts for message in request.messages)


def sources_in(messages: Sequence[pb.ChatMessage]) -> Iterator[MediaSource]:
    """Yield the media of messages."""
    for number, message in enumerate(messages):
        for place, part in enumerate(message.parts):
            if part.HasField("media"):
                yield MediaSource(part.media, f"messages[{number}].parts[{place}]")


def _beside_text(request: pb.GenerateRequest) -> Iterator[MediaSource]:
    for number, medium in enumerate(request.media):
        yield MediaSource(medium, f"media[{number}]")


def drop_data(request: pb.GenerateRequest) -> None:
    """Forget the files of a request, which a preprocessor has made ready."""
    for source in sources_of(request):
        source.medium.ClearField("source")


class ReadyMedia:
    """Media of one request that are ready; a preprocessor holds them until `close`."""

    def __init__(
        self,
        prompt: list[int],
        items: tuple[Item, ...],
        asked: "Asked",
        is_over: Callable[[], bool],
        held: contextlib.ExitStack,
        seconds: float,
        thumbnails: tuple[str, ...] = (),
    ) -> None:
        """Create it; `is_over` tells whether the stream that holds the items has ended, and closing `held` ends it."""
        self.prompt = prompt
        """The prompt with the tokens of all items."""
        self.items = items
        self.asked = asked
        self.seconds = seconds
        """Time that the preprocessor took."""
        self.thumbnails = thumbnails
        """Thumbnails of the first pictures as data: URLs, in order; empty texts where a picture has none."""
        self._is_over = is_over
        self._held = held

    @property
    def broken(self) -> bool:
        """Whether the preprocessor holds the items no longer, as after its death."""
        return self._is_over()

    def close(self) -> None:
        """Let go of the items. Further calls do nothing."""
        self._held.close()


class Asked:
    """One question for a preprocessor, which may be asked again when that one dies."""

    def __init__(
        self, wanted: preprocess_pb2.ProcessRequest, fields: Sequence[str], prompt_field: str, deadline: float
    ) -> None:
        self.wanted: preprocess_pb2.ProcessRequest | None = wanted
        """The question; None where its files are not kept."""
        self.fields = fields
        """Fields of the request that have the media."""
        self.prompt_field = prompt_field
        self.deadline = deadline
        # Each look at `data` copies a file.
        files = (medium.data or medium.url.encode() for medium in wanted.media)
        sizes, self.key = [], b""
        """Digest that decides which preprocessor is asked first, so that the same picture meets the same cache."""
        for file in files:
            self.key = self.key or blake2b(file[:KEY_BYTES], digest_size=16).digest()
            sizes.append(len(file))
        self.num_bytes = sum(sizes)
        self.facts = tuple(
            MediumFacts(medium.kind, 0 if medium.HasField("url") else size)
            for medium, size in zip(wanted.media, sizes, strict=True)
        )


class MediaClient:
    """Client of the preprocessors of one model."""

    def __init__(self, model: str, addresses: Sequence[str], trust: MemberIdentity | None = None) -> None:
        """Create it; `addresses` are host:port of preprocessors, any of which may be asked."""
        self._model = model
        self._addresses = addresses
        self._channels = Channels(trust, connect=media_channel)
        self._modalities: Mapping[str, preprocess_pb2.Modality] | None = None
        """Kinds of media that the model reads; None: not known, or no longer."""
        self._kept_bytes = 0

    async def placeholders(self, sources: Sequence[MediaSource], deadline: float) -> dict[str, str]:
        """Return the model's placeholders by kind of medium.

        Raises InvalidRequest for media that the model does not read, or too many, and Unavailable.
        """
        known = await self._described(deadline)
        counts: Counter[str] = Counter()
        for medium, field in sources:
            modality = known.get(medium.kind)
            if modality is None:
                readable = " and ".join(NAMES.get(kind, kind) for kind in known) or "text only"
                raise InvalidRequest(field, f"{self._model!r} reads no {NAMES[medium.kind]}; it reads {readable}")
            counts[medium.kind] += 1
            if 0 < modality.max_items < counts[medium.kind]:
                limit = f"at most {modality.max_items} {NAMES[medium.kind]}"
                raise InvalidRequest(field, f"{self._model!r} reads {limit} in one request")
        return {kind: modality.placeholder for kind, modality in known.items()}

    async def process(
        self,
        prompt: Sequence[int],
        sources: Sequence[MediaSource],
        prompt_field: str,
        tenant: str,
        context: ReadingContext,
    ) -> ReadyMedia:
        """Have media made ready; the caller must close what is returned.

        Raises InvalidRequest naming the medium's field, Overloaded, Unavailable or DeadlineExceeded.
        """
        wanted = preprocess_pb2.ProcessRequest(
            request_id=context.request_id,
            model=self._model,
            tenant=tenant,
            cache_salt=context.cache_salt,
            prompt_token_ids=prompt,
            media=[source.medium for source in sources],
            thumbnails=context.thumbnails,
        )
        asked = Asked(wanted, [source.field for source in sources], prompt_field, context.deadline)
        return await self._process(asked, wanted)

    async def again(self, ready: ReadyMedia) -> ReadyMedia:
        """Have the media of a lost preprocessor made ready by another one, and close the old ones.

        Raises ServiceError, Unavailable also where the files are not kept.
        """
        ready.close()
        wanted = ready.asked.wanted
        if wanted is None:
            raise Unavailable("the preprocessor of the request's pictures is gone, and the router kept no copy of them")
        new = await self._process(ready.asked, wanted)
        same = [(item.identifier, item.offset, item.length) for item in new.items] == [
            (item.identifier, item.offset, item.length) for item in ready.items
        ]
        if new.prompt != ready.prompt or not same:
            new.close()
            raise Unavailable(f"preprocessors of {self._model!r} make different items of the same pictures")
        return new

    async def _process(self, asked: Asked, wanted: preprocess_pb2.ProcessRequest) -> ReadyMedia:
        failure: ServiceError | None = None
        for address in self._order(asked.key):
            try:
                return await self._process_at(address, asked, wanted)
            except (Unavailable, Overloaded) as error:
                if isinstance(error, Overloaded) and error.permanent:
                    raise
                if isinstance(error, Unavailable):
                    self._modalities = None
                log.warning("%s", error)
                failure = error
        assert failure is not None, "there is an address"
        raise failure

    async def _process_at(self, address: str, asked: Asked, wanted: preprocess_pb2.ProcessRequest) -> ReadyMedia:
        with contextlib.ExitStack() as held:
            stub = preprocess_pb2_grpc.PreprocessStub(held.enter_context(self._channels.using(address)))
            asked_at = time.monotonic()
            call = stub.Process(wanted, timeout=_remaining_s(asked.deadline))
            held.callback(call.cancel)
            try:
                reply = await call.read()
            except grpc.aio.AioRpcError as error:
                raise self._typed(from_rpc_error(error), address, asked) from None
            if not isinstance(reply, preprocess_pb2.ProcessReply):
                raise Unavailable(f"preprocessor {address} ended a request without an answer")
            items = tuple(item if item.address else item._replace(address=address) for item in read_items(reply.items))
            prompt = list(reply.prompt_token_ids)
            if fault := items_fault(items, len(prompt)):
                raise Unavailable(f"preprocessor {address} made items that cannot be used: {fault}")
            thumbnails = thumbnail_urls(reply.thumbnails) if wanted.thumbnails else ()
            self._keep(asked, held)
            seconds = time.monotonic() - asked_at
            return ReadyMedia(prompt, items, asked, call.done, held.pop_all(), seconds, thumbnails)

    def _keep(self, asked: Asked, held: contextlib.ExitStack) -> None:
        """Keep the files for another preprocessor while there is room."""
        if asked.wanted is None or self._kept_bytes + asked.num_bytes > KEPT_BYTES:
            asked.wanted = None
            return
        self._kept_bytes += asked.num_bytes
        held.callback(self._drop, asked.num_bytes)

    def _drop(self, num_bytes: int) -> None:
        self._kept_bytes -= num_bytes

    async def _described(self, deadline: float) -> Mapping[str, preprocess_pb2.Modality]:
        if (known := self._modalities) is not None:
            return known
        failure: ServiceError | None = None
        for address in self._addresses:
            try:
                with self._channels.using(address) as channel:
                    stub = preprocess_pb2_grpc.PreprocessStub(channel)
                    limit_s = min(DESCRIBE_S, _remaining_s(deadline))
                    reply = await stub.Describe(preprocess_pb2.DescribeRequest(model=self._model), timeout=limit_s)
            except grpc.aio.AioRpcError as error:
                failure = _unavailable(from_rpc_error(error), address)
                log.warning("%s", failure)
            else:
                self._modalities = {modality.kind: modality for modality in reply.modalities}
                return self._modalities
        assert failure is not None, "there is an address"
        raise failure

    def _order(self, key: bytes) -> list[str]:
        """Return the addresses, best first; each key has its own order, which others' coming and going keeps."""
        if len(self._addresses) == 1:
            return list(self._addresses)
        return sorted(self._addresses, key=lambda address: blake2b(key + address.encode(), digest_size=8).digest())

    def _typed(self, error: ServiceError, address: str, asked: Asked) -> ServiceError:
        """Return a preprocessor's error for the client, with the field of its own request."""
        if not isinstance(error, InvalidRequest | Overloaded | DeadlineExceeded):
            return _unavailable(error, address)
        place = _PLACE.fullmatch(error.field)
        is_of_medium = place is not None and int(place[1]) < len(asked.fields)
        field = asked.fields[int(place[1])] if place is not None and is_of_medium else asked.prompt_field
        if isinstance(error, InvalidRequest):
            return InvalidRequest(field, error.message)
        field = field if error.field else ""
        if isinstance(error, Overloaded):
            return Overloaded(error.message, field, error.permanent, error.retry_after_s, error.limit)
        return DeadlineExceeded(error.message, field)


def thumbnail_urls(files: Sequence[bytes]) -> tuple[str, ...]:
    """Return thumbnails as data: URLs of at most 8 KiB; empty texts for those that are missing or too large."""
    return tuple(
        f"data:image/webp;base64,{b64encode(file).decode()}" if 0 < len(file) <= MAX_THUMBNAIL_BYTES else ""
        for file in files[:MAX_THUMBNAILS]
    )


def _unavailable(error: ServiceError, address: str) -> Unavailable:
    return Unavailable(f"preprocessor {address}: {error.message}")


def _remaining_s(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise DeadlineExceeded("the deadline passed before the request's pictures were ready")
    return remaining
