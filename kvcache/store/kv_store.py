"""Interface of a store below the pool as an engine's loop sees it; the simulator has a store in virtual time.

An engine has at most two: a *local* one in main memory or on a disk of its host, whose blocks count as this worker's,
and the *shared* one of all workers.

Settings of the stores below a worker's pool.

Contract of a place that keeps objects: a folder or a bucket.

Format of one stored block.

    header │ fingerprints │ checksum │ padding │ payload

The header names the model, the block and its parent. Integers are little-endian. The checksum covers everything before
it. With a secret it also covers the payload and is keyed, so only holders of the secret can write an object that is
read; without one it detects damage only, as the fingerprints do for the payload.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt, field_validator

from cluster.config import Config
from kvcache.block_keys import KEY_BYTES, BlockKey
from kvcache.pool import CacheEvent


@dataclass(frozen=True, slots=True)
class Fetched:
    """Blocks that a fetch brought: a leading part of those wanted."""

    fingerprints: tuple[bytes, ...]
    """Stored fingerprints, one per block; the bytes are not compared with them yet."""
    contents: tuple[NDArray[np.uint8], ...]
    """Bytes of the blocks, [block_bytes] each, until the fetch is given back."""
    failure: str
    """Why the next block did not come; empty when all came."""
    buffer: NDArray[np.uint8] | None = None
    """Memory behind `contents`."""


class PlaceUse(NamedTuple):
    """Use of one place of a store, in blocks."""

    name: str
    capacity: int
    used: int
    hits: int
    """Blocks read from it since the start."""


class KvStore(ABC):
    """Blocks that left a pool.

    Methods belong to the engine's loop thread and never wait; callbacks come on any thread, once each.
    """

    identity: str
    """Name that is equal for workers that use the same store."""
    is_local: bool = False
    """Whether it belongs to this host, so that its blocks count as this worker's."""
    has_other_writers: bool = False
    """Whether other processes may write to a local store, so that it may have more than this engine knows."""
    writes_at_once: bool = False
    """Whether blocks are put as soon as they are computed, not only when the pool evicts them."""
    blocks_per_fetch: int
    """Largest number of blocks of one fetch."""

    @property
    @abstractmethod
    def answers(self) -> bool:
        """Whether the store is worth asking now; False for a while after it fell silent."""

    @property
    @abstractmethod
    def num_writable(self) -> int:
        """Number of blocks for which `put` has memory now."""

    @abstractmethod
    def lacks(self, key: BlockKey) -> bool:
        """Return whether the block should be written: it is not known to be stored, or being written."""

    @abstractmethod
    def num_known(self, keys: Iterable[BlockKey]) -> int:
        """Return how many leading keys this engine knows to be stored."""

    @abstractmethod
    def known_keys(self) -> list[BlockKey]:
        """Return the keys that this engine knows to be stored."""

    @abstractmethod
    def put(self, parent: BlockKey, key: BlockKey, content: NDArray[np.uint8], fingerprint: bytes) -> None:
        """Keep a copy of a block, uint8 [block_bytes], that the store `lacks` and has memory for."""

    @abstractmethod
    def drop(self, count: int) -> None:
        """Count blocks that are not put for lack of memory."""

    @abstractmethod
    def find(self, keys: Sequence[BlockKey], on_found: Callable[[int], object]) -> None:
        """Call `on_found` with the number of leading keys that the store seems to hold."""

    @abstractmethod
    def fetch(self, keys: Sequence[BlockKey], on_fetched: Callable[[Fetched], object]) -> None:
        """Read at most `blocks_per_fetch` blocks; each fetch must be given back, whatever it brought."""

    @abstractmethod
    def give_back(self, fetched: Fetched) -> None:
        """Return the memory of a fetch.

        A copy of it may still run if its loan is over: it writes into quarantined blocks, whatever it reads.
        """

    @abstractmethod
    def run(self, copy: Callable[[], None]) -> "Future[None]":
        """Run `copy`, which copies fetched blocks into the pool, beside the loop."""

    @abstractmethod
    def refuse(self, key: BlockKey) -> None:
        """Remove a block whose bytes differ from its fingerprint."""

    keeps_objects: str = ""
    """Why objects cannot be removed; empty where these can."""

    @abstractmethod
    def remove(self, keys: Sequence[BlockKey], on_removed: Callable[[int, str], object]) -> None:
        """Remove blocks, then call `on_removed` with the number of those that were there, and with a failure if any."""

    @abstractmethod
    def fell_silent(self) -> None:
        """Process that a loan gave the store up."""

    @abstractmethod
    def take_events(self) -> list[CacheEvent]:
        """Return what this engine learned since the last call of the store's contents."""

    @abstractmethod
    def snapshot(self) -> list[CacheEvent]:
        """Return all that this engine knows of the store's contents."""

    def outcomes(self) -> tuple[tuple[str, int], ...]:
        """Return numbers of blocks since the start, by what became of them."""
        return ()

    def places(self) -> list[PlaceUse]:
        """Return the use of each place of a local store."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Write what is queued, within bounds, and release the store."""


class StoreSettings(Config):
    """Part of a worker's settings."""

    kv_host_memory_mib: NonNegativeInt = 0
    """Host memory for evicted blocks, in MiB, as files in /dev/shm, which must be that large. Blocks are restored from
    there where that is faster than computing."""
    kv_host_memory_shared: bool = False
    """Whether workers of this host share one such memory, as large as the largest of them sets it: blocks that one
    evicted are restored by another of the same model."""
    kv_disk_dir: Path | None = None
    """Directory for evicted blocks, beside host memory. Its contents outlive the worker. Workers of one host may share
    it: those of one model share its blocks. A block that was not used for a week is removed."""
    kv_disk_mib: PositiveInt = 4096
    """Largest size of one model's blocks in `kv_disk_dir`, in MiB. The blocks used longest ago are removed."""
    kv_store: str = ""
    """Store for KV blocks that all workers share and that outlives them: a folder that all of them mount, or
    s3://bucket/prefix. Blocks are fetched from there where that is faster than computing them, and verified. S3 takes
    its endpoint, region and credentials from AWS's environment variables, and needs a lifecycle rule that expires
    objects. Only workers of equal weights and layout share blocks, with any `tensor_parallel` and `pipeline_parallel`.
    Default: no store."""
    kv_store_gib: PositiveInt = 64
    """Largest size of one model's blocks in a folder, in GiB. The blocks used longest ago are removed, and those that
    were not used for a week. With several writers it may be exceeded for some seconds."""
    kv_store_writes: Literal["evicted", "computed"] = "evicted"
    """Blocks that are written to the store. evicted: those that leave a worker's pool. computed: all, at once, so that
    other workers find them and none is lost with a worker, for more writing."""
    kv_store_secret_file: Path | None = None
    """File with a secret, at least 16 bytes, that signs blocks in the store. Without it whoever can write there can
    plant wrong KV. All workers need the same secret; hashing costs about a millisecond per MiB. Default: unsigned."""

    @field_validator("kv_store")
    @classmethod
    def _is_folder_or_bucket(cls, value: str) -> str:
        scheme, separator, rest = value.partition("://")
        if separator and (scheme != "s3" or not rest.partition("/")[0]):
            raise ValueError(f"{value!r} is neither a folder nor s3://bucket/prefix")
        return value


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
