"""Contract of a place that keeps objects: a folder or a bucket.

Format of one stored block.

    header │ fingerprints │ checksum │ padding │ payload

The header names the model, the block and its parent. Integers are little-endian. The checksum covers everything before
it. With a secret it also covers the payload and is keyed, so only holders of the secret can write an object that is
read; without one it detects damage only, as the fingerprints do for the payload.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvcache.block_keys import KEY_BYTES, BlockKey
from kvcache.store.kv_store import PlaceUse


class StoreError(Exception):
    """A failure of the place itself, such as a full disk or a server that does not answer."""


class ObjectMissing(Exception):
    """No object has this name, or not all of it could be read."""


ReadFailure = ObjectMissing | StoreError
"""Failure of one object's read; a damaged object counts as missing where its length tells."""


class Objects(ABC):
    """Objects of one length, by name.

    All methods may be called on several threads at once, and block.
    """

    identity: str
    """Name that is equal for processes that use the same place."""
    reads_at_once: int
    """Largest number of objects that one `read` should get."""
    keeps_objects: str = ""
    """Why objects cannot be removed; empty where these can."""

    @abstractmethod
    def held(self, names: Sequence[str]) -> list[bool]:
        """Return which objects exist, perhaps with damaged contents.

        Raises StoreError.
        """

    @abstractmethod
    def read(self, names: Sequence[str], into: Sequence[NDArray[np.uint8]]) -> list[ReadFailure | None]:
        """Fill `into`, uint8 [object bytes] each, and return each object's failure, or None."""

    @abstractmethod
    def write(self, name: str, stored: NDArray[np.uint8]) -> None:
        """Create or replace an object, whole or not at all.

        Raises StoreError.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove an object if it exists and if the place allows it.

        Raises StoreError.
        """

    @abstractmethod
    def used(self, name: str) -> None:
        """Record a use of an object, so that it is evicted later; a place that cannot does nothing."""

    def trim(self, name: str) -> list[str]:
        """Evict objects beyond the bounds after `name` was written; return the names of evicted ones.

        Raises StoreError.
        """
        return []

    def close(self) -> None:  # noqa: B027 - a folder has nothing to close
        """Release what the place holds; no call follows."""


class LocalObjects(Objects):
    """Objects in a place of this host, which can be listed."""

    @abstractmethod
    def heads(self, folder: str, num_bytes: int) -> Iterator[tuple[str, bytes]]:
        """Yield the names of all objects of a folder, with the first `num_bytes` of each.

        Raises StoreError.
        """

    @abstractmethod
    def places(self) -> list[PlaceUse]:
        """Return the use of each part of the place."""


MAGIC = b"TNDMKVOB"
VERSION = 1
CHECKSUM_BYTES = 16
ALIGNMENT = 64
"""The payload's offset is a multiple of it, so that payloads can be read as words."""
_HEADER = Struct(f"<8sIIQ32s{KEY_BYTES}s{KEY_BYTES}s")  # magic, version, kv_heads, block_bytes, model, parent, key


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Block `key`, which follows `parent`, as an object describes it."""

    parent: BlockKey
    key: BlockKey
    fingerprint: bytes
    """Fingerprint, 8 bytes per KV head."""


class ObjectRefused(Exception):
    """An object that is not the wanted block; the message says why."""


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """Encoding of blocks of `block_bytes` with `kv_heads` fingerprints each."""

    block_bytes: int
    kv_heads: int
    model: bytes
    """Fingerprint of weights and KV layout, up to 64 bytes."""
    secret: bytes = b""
    """Key of the checksums, up to 64 bytes; empty for none."""
    num_folders: Literal[1, 256] = 256
    """Folders among which the objects of a model are spread."""

    @property
    def payload_offset(self) -> int:
        return -(-(self._checked_bytes + CHECKSUM_BYTES) // ALIGNMENT) * ALIGNMENT

    @property
    def object_bytes(self) -> int:
        return self.payload_offset + self.block_bytes

    @property
    def folder(self) -> str:
        """Name of the folder with all objects of this format."""
        return blake2b(self.model + self.block_bytes.to_bytes(8, "little"), digest_size=16).hexdigest()

    def name(self, key: BlockKey) -> str:
        """Return the object's name: its folder, one of 256 by the key's first byte, and the key."""
        digits = key.hex()
        return f"{self.folder}/{digits}" if self.num_folders == 1 else f"{self.folder}/{digits[:2]}/{digits}"

    def pack(self, block: StoredBlock, into: NDArray[np.uint8]) -> None:
        """Complete an object, uint8 [object_bytes], whose payload is there."""
        fields = self._fields(block.parent, block.key) + block.fingerprint
        assert len(fields) == self._checked_bytes
        head = (fields + self._checksum(fields, into)).ljust(self.payload_offset, b"\0")
        into[: self.payload_offset] = np.frombuffer(head, np.uint8)

    def check(self, key: BlockKey, stored: NDArray[np.uint8]) -> StoredBlock:
        """Return the block that `stored`, uint8 [object_bytes], describes.

        Raises ObjectRefused unless it is the block `key` of this model.
        """
        return self._checked(key, stored[: self.payload_offset].tobytes(), stored)

    def check_head(self, key: BlockKey, head: bytes) -> StoredBlock:
        """Return the block that the first `payload_offset` bytes of an object describe.

        Raises ObjectRefused as `check` does; the payload is checked when it is read.
        """
        if self.secret or len(head) < self.payload_offset:
            raise ObjectRefused("the object is too short, or signed, to be known by its head")
        return self._checked(key, head, np.frombuffer(head, np.uint8))

    def _checked(self, key: BlockKey, head: bytes, stored: NDArray[np.uint8]) -> StoredBlock:
        magic, version, kv_heads, block_bytes, model, parent, stored_key = _HEADER.unpack_from(head)
        if magic != MAGIC or version != VERSION:
            raise ObjectRefused("the object is not a KV block of this format version")
        fields = head[: self._checked_bytes]
        if head[self._checked_bytes :][:CHECKSUM_BYTES] != self._checksum(fields, stored):
            raise ObjectRefused("the object's checksum is wrong")
        if (kv_heads, block_bytes, model) != (self.kv_heads, self.block_bytes, self._model):
            raise ObjectRefused("the object belongs to another model or KV layout")
        if stored_key != key:
            raise ObjectRefused("the object contains another block")
        return StoredBlock(parent, key, fields[_HEADER.size :])

    @property
    def _checked_bytes(self) -> int:
        return _HEADER.size + 8 * self.kv_heads

    @property
    def _model(self) -> bytes:
        return blake2b(self.model, digest_size=32).digest()

    def _fields(self, parent: BlockKey, key: BlockKey) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, self.kv_heads, self.block_bytes, self._model, parent, key)

    def _checksum(self, fields: bytes, stored: NDArray[np.uint8]) -> bytes:
        checksum = blake2b(fields, key=self.secret, digest_size=CHECKSUM_BYTES)
        if self.secret:
            checksum.update(stored[self.payload_offset :].data)
        return checksum.digest()
