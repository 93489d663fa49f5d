"""Interface of what makes media ready for an engine's model.

An engine that reads media has a `MediaProcessor`, which a preprocessor runs in a child process beside the routers.

Interface of an engine's encoder alone, which an encode worker runs: from an item's tensors to its embeddings.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from kvcache.items import Item

MediaKind = Literal["image", "audio", "video"]

MAX_THUMBNAILS = 8
"""Most thumbnails of one request."""
MAX_THUMBNAIL_BYTES = 6000
"""Most bytes of a thumbnail, which as a data: URL has at most 8 KiB."""
THUMBNAIL_PIXELS = 96
"""Most width and height of a thumbnail."""


NUMBER = "{number}"


class MediaInput(NamedTuple):
    """One encoded file, such as a PNG."""

    kind: MediaKind
    data: bytes


class MediaLimits(NamedTuple):
    """Limits of each file, which are checked before it is decoded."""

    max_pixels: int
    """Most pixels of a picture, or of one frame of a video."""
    max_sound_s: int
    """Longest sound in seconds."""


class Modality(NamedTuple):
    """Placeholder and limit of one kind of medium that a model reads."""

    placeholder: str
    """Text that stands for one item in a prompt; `NUMBER` in it is the item's number of its kind, from 1."""
    max_items: int = 0
    """Most items of one request; 0: any number."""


class ProcessedItem(NamedTuple):
    """One item that is ready."""

    identifier: str
    """Hash of its content, and of all else that decides what the model's encoder makes of it."""
    offset: int
    length: int
    """Its tokens are [offset, offset + length) of the prompt."""
    details: bytes
    """Small tensors that the model needs even where the KV of the item's tokens is cached."""
    blob: bytes
    """Tensors that the model's encoder reads."""


class Processed(NamedTuple):
    token_ids: list[int]
    """The prompt, with as many tokens for each item as the model takes."""
    items: list[ProcessedItem]
    """Items in order of their places."""
    thumbnails: Sequence[bytes] = ()
    """WebP files of the first pictures, in order; an empty one where a picture has none."""


class MediaRefused(Exception):
    """The media cannot be read, or do not fit to the prompt; its text is for the client."""

    def __init__(self, reason: str, place: int | None = None) -> None:
        """Create it; `place` is the index of the file at fault, where it is one file's fault."""
        super().__init__(reason)
        self.reason = reason
        self.place = place


class MediaProcessor(ABC):
    """Media processor of one model; one thread uses it."""

    modalities: Mapping[MediaKind, Modality]

    @abstractmethod
    def process(
        self, token_ids: Sequence[int], media: Sequence[MediaInput], limits: MediaLimits, thumbnails: bool = False
    ) -> Processed:
        """Decode the files and expand the prompt's placeholders, of which each kind has as many as files.

        `thumbnails`: whether to make thumbnails of the first `MAX_THUMBNAILS` pictures. Raises MediaRefused.
        """


class Embeddings(NamedTuple):
    """Embeddings of one item."""

    dtype: str
    """Name of the data type, as torch has it: bfloat16."""
    shape: tuple[int, ...]
    """[tokens of the item that are embedded, width]."""
    data: bytes

    def fingerprint(self) -> bytes:
        """Return the fingerprint of type, shape and bytes, 16 bytes."""
        head = f"{self.dtype} {self.shape}".encode()
        return blake2b(self.data, key=blake2b(head, digest_size=16).digest(), digest_size=16).digest()


class MediaEncoder(ABC):
    """Encoder of one model; one thread uses it."""

    fingerprint: bytes
    """Fingerprint of the model's weights and data type."""

    @abstractmethod
    def encode(self, item: Item, blob: bytes) -> Embeddings:
        """Compute the embeddings of an item from its blob.

        Raises ValueError for an item or a blob that cannot be read.
        """


def encoder_fingerprint(weights: bytes, dtype: str) -> bytes:
    """Return the fingerprint that an encode worker and the workers of its model share; 16 bytes."""
    return blake2b(weights + dtype.encode(), digest_size=16).digest()
