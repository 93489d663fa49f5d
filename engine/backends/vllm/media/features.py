"""vLLM's media features: as bytes between a preprocessor and an engine, and what an engine knows of their blobs."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from engine.core_types import EngineSequence
from engine.media import ProcessedItem
from engine.messages.from_engine import ItemsWanted
from engine.messages.to_engine import ItemsFetched
from kvcache.items import Item

DETAIL_BYTES = 4096
"""Size up to which a tensor goes with the request. Such are the grids of patches, which decide rotary positions."""
_INLINE = 1 << 62
"""Threshold with which vLLM's encoder writes all tensors into one buffer."""


class _Details(msgspec.Struct):
    modality: str
    is_embed: bytes
    """A byte for each token, 1 where the encoder's output replaces its embedding; empty where it does for all."""
    small: bytes
    """The item's small tensors."""


def pack(feature: MultiModalFeatureSpec) -> ProcessedItem:
    """Return the item of a feature that vLLM's input processor has made."""
    assert feature.data is not None, "the processor has no cache of its own"
    position = feature.mm_position
    is_embed = b"" if position.is_embed is None else position.is_embed.to(torch.uint8).numpy().tobytes()
    small = {name: each for name, each in feature.data.items() if _num_bytes(each.data) <= DETAIL_BYTES}
    details = _Details(feature.modality, is_embed, _encode(MultiModalKwargsItem(small)))
    blob = _encode(feature.data)
    return ProcessedItem(feature.identifier, position.offset, position.length, msgspec.msgpack.encode(details), blob)


def unpack(item: Item, blob: bytes | None) -> MultiModalFeatureSpec:
    """Return the feature of an item; without its blob it has the small tensors only.

    Raises ValueError for bytes that are no item.
    """
    try:
        details = msgspec.msgpack.decode(item.details, type=_Details)
        data = MsgpackDecoder(MultiModalKwargsItem).decode(details.small if blob is None else blob)
        mask = torch.frombuffer(bytearray(details.is_embed), dtype=torch.bool) if details.is_embed else None
    except (msgspec.MsgspecError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise ValueError(f"the item {item.identifier.hex()} cannot be read: {error}") from error
    name = item.identifier.hex()
    position = PlaceholderRange(item.offset, item.length, mask)
    return MultiModalFeatureSpec(data, details.modality, name, position, name)


class Media:
    """Items of an engine's sequences, and the blobs that vLLM's encoder needs of them.

    A sequence whose cached and lent blocks do not cover an item waits for its blob before vLLM gets it. Later vLLM may
    need a blob that was not needed then, because it has preempted the sequence and given its blocks away. Then the
    sequence is `lost`: it is not computed here, and the router places its request again.
    """

    def __init__(self, scheduler: Any, ask: Callable[[ItemsWanted], None], fingerprint: bytes) -> None:
        """Create it for vLLM's scheduler; `ask` sends a message to the front.

        `fingerprint` is the model's, for encode workers.
        """
        self._ask = ask
        self._connector = scheduler.ec_connector
        """EmbeddingsConnector; None for a model without an encoder."""
        self._fingerprint = fingerprint if self._connector is not None else b""
        self._embedded: dict[EngineSequence, list[str]] = {}
        """Identifiers of embeddings that were offered to vLLM for a sequence."""
        self._most = int(scheduler.encoder_cache_manager.cache_size)
        self._waiting: dict[tuple[str, int], tuple[EngineSequence, int]] = {}
        """Sequences, and the numbers of blocks that are reserved for them."""
        self._blobs: dict[EngineSequence, dict[bytes, bytes]] = {}
        """Blobs of sequences that vLLM gets next."""
        self._lacking: dict[str, frozenset[int]] = {}
        """Numbers of items without a blob, by the id of vLLM's request."""
        self._lost: list[str] = []
        self._schedule_inputs = scheduler._try_schedule_encoder_inputs
        scheduler._try_schedule_encoder_inputs = self._try_schedule_encoder_inputs

    def refusal(self, items: tuple[Item, ...]) -> str:
        """Return why a request with such items cannot be computed here; empty where it can."""
        for place, item in enumerate(items):
            try:
                size = unpack(item, None).mm_position.get_num_embeds()
            except ValueError as error:
                return f"items[{place}]: {error}"
            if size > self._most:
                return (
                    f"items[{place}]: {size} tokens, vLLM's encoder takes at most {self._most} "
                    "(max_num_batched_tokens of the workers)"
                )
        return ""

    def awaits(self, sequence: EngineSequence, num_blocks: int) -> bool:
        """Return whether the sequence waits for blobs, and ask for them the first time."""
        if not sequence.items or sequence in self._blobs:
            return False
        key = sequence.request_id, sequence.choice
        if key in self._waiting:
            return True
        wanted = tuple(item for item in sequence.items if item.end > sequence.num_computed)
        if not wanted:
            return False
        self._waiting[key] = sequence, num_blocks
        self._ask(ItemsWanted(*key, wanted, self._fingerprint))
        return True

    def fetched(self, message: ItemsFetched) -> tuple[EngineSequence, int] | None:
        """Take the blobs of a sequence; return it with the number of its reserved blocks, None where it is over."""
        waiting = self._waiting.pop((message.request_id, message.choice), None)
        if waiting is not None and not message.failure:
            self._blobs[waiting[0]] = dict(message.blobs)
            if message.embeddings:
                embeddings = {identifier.hex(): each for identifier, each in message.embeddings}
                self._embedded[waiting[0]] = list(embeddings)
                self._connector.offer(embeddings)
        return waiting

    def features(self, sequence: EngineSequence, request_id: str) -> list[MultiModalFeatureSpec] | None:
        """Return vLLM's features of a sequence, for its request of this id.

        Raises ValueError for a blob that cannot be read.
        """
        if not sequence.items:
            return None
        blobs, embedded = self._blobs.pop(sequence, {}), self._embedded.get(sequence, ())
        self._lacking[request_id] = frozenset(
            place
            for place, item in enumerate(sequence.items)
            if item.identifier not in blobs and item.identifier.hex() not in embedded
        )
        return [unpack(item, blobs.get(item.identifier)) for item in sequence.items]

    def forget(self, sequence: EngineSequence, request_id: str | None) -> None:
        """Forget a sequence that is over."""
        if sequence.items:
            self._waiting.pop((sequence.request_id, sequence.choice), None)
            self._blobs.pop(sequence, None)
            if (embedded := self._embedded.pop(sequence, None)) is not None:
                self._connector.withdraw(embedded)
            if request_id is not None:
                self._lacking.pop(request_id, None)

    def take_lost(self) -> list[str]:
        """Return the ids of vLLM's requests that lack a blob since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def _try_schedule_encoder_inputs(
        self, request: Any, num_computed: int, num_new: int, budget: int, *arguments: Any, **options: Any
    ) -> tuple[Any, ...]:
        """Schedule what vLLM would, unless the encoder would need a blob that is not here."""
        inputs, *others = self._schedule_inputs(request, num_computed, num_new, budget, *arguments, **options)
        if inputs and not self._lacking.get(request.request_id, frozenset()).isdisjoint(inputs):
            self._lost.append(request.request_id)
            return [], 0, budget, *([] for _ in others[2:])
        return inputs, *others


def _encode(data: MultiModalKwargsItem) -> bytes:
    (buffer,) = MsgpackEncoder(size_threshold=_INLINE).encode(data)
    return bytes(buffer)


def _num_bytes(data: object) -> int:
    if isinstance(data, torch.Tensor):
        return data.nbytes
    return sum(map(_num_bytes, data)) if isinstance(data, list | tuple) else 8
