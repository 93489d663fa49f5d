"""vLLM's media features as bytes: what a preprocessor makes of them, and what an engine reads again."""

import msgspec
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from engine.items import Item
from engine.media_processor import ProcessedItem

DETAIL_BYTES = 4096
"""Size up to which a tensor goes with the request. Such are the grids of patches, which decide rotary positions."""
_INLINE = 1 << 62
"""Threshold with which vLLM's encoder writes all tensors into one buffer."""


class _Details(msgspec.Struct, array_like=True):  # type: ignore[call-arg]  # its types are not installed
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


def _encode(data: MultiModalKwargsItem) -> bytes:
    (buffer,) = MsgpackEncoder(size_threshold=_INLINE).encode(data)
    return bytes(buffer)


def _num_bytes(data: object) -> int:
    if isinstance(data, torch.Tensor):
        return data.nbytes
    return sum(map(_num_bytes, data)) if isinstance(data, list | tuple) else 8
