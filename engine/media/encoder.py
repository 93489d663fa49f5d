"""Interface of an engine's encoder alone, which an encode worker runs: from an item's tensors to its embeddings."""

from abc import ABC, abstractmethod
from hashlib import blake2b
from typing import NamedTuple

from kvcache.items import Item


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
