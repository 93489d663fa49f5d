"""The local store of a worker: blocks that its pool evicted, in main memory and on a disk of its host.

Both are folders of `folder.py`, memory one in /dev/shm. A block is written to each; a read takes the first that has it.
The folder on disk outlives the worker, and workers of one model may share it. The one in memory is this worker's or,
where set so, that of all workers of the host and user; the last process that holds its lock removes it. What processes
that were killed have left there goes when a worker starts.

Opening of the stores that a worker's settings name.
"""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from cluster.errors import StartError
from kvcache.block_keys import KEY_BYTES
from kvcache.kv_stats import DISK, HOST
from kvcache.layout import Allocate, KvLayout, private_rows
from kvcache.store.block_store import BlockStore
from kvcache.store.bucket import BucketObjects
from kvcache.store.folder import FolderObjects
from kvcache.store.kv_store import (
    KvStore,
    LocalObjects,
    ObjectFormat,
    ObjectMissing,
    Objects,
    PlaceUse,
    ReadFailure,
    StoreError,
    StoreSettings,
)
from kvtransfer.hardware.main_memory import check_fits

MEMORY = Path("/dev/shm")
"""Folder in main memory, which every Linux has."""
SHARED = "shared"
LOCK = "lock"
STALE_S = 7 * 24 * 3600.0
"""Age at which a block on disk that was not used is removed, in seconds."""
MODEL_FOLDER, BLOCK_FILE = re.compile("[0-9a-f]{32}"), re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")
"""Names of folders and files that this module makes; nothing else is removed from a user's directory."""
OLD_FILES = "*-*/kv-*.blocks"
"""Files of earlier versions, which this one cannot read."""
MIB = 1 << 20


class LayeredObjects(LocalObjects):
    """Objects in several local places, the fastest first."""

    def __init__(self, places: Sequence[LocalObjects]) -> None:
        self._places = places
        self.identity = places[0].identity
        self.reads_at_once = places[0].reads_at_once

    def held(self, names: Sequence[str]) -> list[bool]:
        return [any(place.held([name])[0] for place in self._places) for name in names]

    def read(self, names: Sequence[str], into: Sequence[NDArray[np.uint8]]) -> list[ReadFailure | None]:
        return [self._read(name, row) for name, row in zip(names, into, strict=True)]

    def _read(self, name: str, row: NDArray[np.uint8]) -> ReadFailure | None:
        failure: ReadFailure | None = ObjectMissing(name)
        for place in self._places:
            (failure,) = place.read([name], [row])
            if failure is None:
                break
        return failure

    def write(self, name: str, stored: NDArray[np.uint8]) -> None:
        for place in self._places:
            place.write(name, stored)

    def remove(self, name: str) -> None:
        for place in self._places:
            place.remove(name)

    def used(self, name: str) -> None:
        for place in self._places:
            place.used(name)

    def trim(self, name: str) -> list[str]:
        evicted = [each for place in self._places for each in place.trim(name)]
        return [each for each in dict.fromkeys(evicted) if not self.held([each])[0]]

    def heads(self, folder: str, num_bytes: int) -> Iterator[tuple[str, bytes]]:
        for place in self._places:
            yield from place.heads(folder, num_bytes)

    def places(self) -> list[PlaceUse]:
        return [use for place in self._places for use in place.places()]

    def close(self) -> None:
        for place in self._places:
            place.close()


class MemoryFolder(FolderObjects):
    """Folder in main memory, removed by the last process that holds its lock."""

    def __init__(self, root: Path, object_bytes: int, max_bytes: int) -> None:
        """Open or create the folder.

        Raises StoreError.
        """
        self.lock_file = _hold(root)
        super().__init__(root, object_bytes, max_bytes, STALE_S, num_folders=1, place=HOST)

    def close(self) -> None:
        _remove_if_unused(self._root, self.lock_file)
        os.close(self.lock_file)


def open_local_store(
    settings: StoreSettings, layout: KvLayout, model_fingerprint: bytes, allocate: Allocate = private_rows
) -> BlockStore | None:
    """Open the store of evicted blocks below a pool, or return None without one.

    `allocate` returns memory for fetches. Raises StartError naming kv_host_memory_mib, kv_disk_mib or
    kv_disk_dir.
    """
    object_format = ObjectFormat(layout.block_bytes, layout.kv_heads, model_fingerprint, num_folders=1)
    places: list[LocalObjects] = []
    if settings.kv_host_memory_mib:
        places.append(_open_memory(settings, object_format))
    if settings.kv_disk_dir is not None:
        places.append(_open_disk(settings.kv_disk_dir, settings.kv_disk_mib * MIB, object_format))
    if not places:
        return None
    others = settings.kv_host_memory_shared or settings.kv_disk_dir is not None
    return BlockStore(LayeredObjects(places), object_format, is_local=True, has_other_writers=others, allocate=allocate)


def _open_memory(settings: StoreSettings, object_format: ObjectFormat) -> MemoryFolder:
    num_bytes = settings.kv_host_memory_mib * MIB
    if num_bytes < object_format.object_bytes:
        reason = f"is less than one KV block of {object_format.object_bytes} bytes with its header"
        raise StartError("kv_host_memory_mib", reason)
    folder = MEMORY / f"tandem-kv-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        _remove_abandoned(folder)
        check_fits(num_bytes)
        status = os.statvfs(MEMORY)
        if (free := status.f_bavail * status.f_frsize) < num_bytes:
            raise OSError(
                0, f"{MEMORY} has {free // MIB} MiB left: enlarge it (docker --shm-size, chart worker.sharedMemory)"
            )
        root = folder / (SHARED if settings.kv_host_memory_shared else uuid4().hex)
        return MemoryFolder(root, object_format.object_bytes, num_bytes)
    except OSError as error:
        raise StartError("kv_host_memory_mib", error.strerror or str(error)) from error
    except StoreError as error:
        raise StartError("kv_host_memory_mib", str(error)) from error


def _open_disk(root: Path, num_bytes: int, object_format: ObjectFormat) -> FolderObjects:
    if num_bytes < object_format.object_bytes:
        reason = f"is less than one KV block of {object_format.object_bytes} bytes with its header"
        raise StartError("kv_disk_mib", reason)
    try:
        objects = FolderObjects(root, object_format.object_bytes, num_bytes, STALE_S, num_folders=1, place=DISK)
    except StoreError as error:
        raise StartError("kv_disk_dir", str(error)) from error
    _remove_stale(root, object_format.folder)
    return objects


def _hold(root: Path) -> int:
    """Create a folder and return a descriptor with which this process holds its lock.

    Raises OSError.
    """
    while True:
        root.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # another process removed the folder at this moment
            lock = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock).st_nlink:
                return lock
            os.close(lock)


def _remove_if_unused(root: Path, lock: int) -> None:
    """Remove a folder unless another process holds its lock."""
    with suppress(OSError):  # in use, or removed by another process
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (root / LOCK).unlink()  # first, so that nobody holds a folder that is being removed
        shutil.rmtree(root, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove folders in memory whose processes are gone."""
    for root in folder.iterdir():
        with suppress(OSError):
            lock = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                _remove_if_unused(root, lock)
            finally:
                os.close(lock)


def _remove_stale(root: Path, own: str) -> None:
    """Remove blocks of other models that were not used for STALE_S, and files of earlier versions."""
    for path in root.glob(OLD_FILES):
        with suppress(OSError):  # another process removed it
            path.unlink()
            path.parent.rmdir()
    now = time.time()
    for folder in root.iterdir():
        if folder.name == own or not MODEL_FOLDER.fullmatch(folder.name):
            continue
        for path in folder.iterdir():
            with suppress(OSError):
                if BLOCK_FILE.fullmatch(path.name) and now - path.lstat().st_mtime > STALE_S:
                    path.unlink()
        with suppress(OSError):  # it is not empty
            folder.rmdir()


GIB = 1 << 30
MIN_SECRET_BYTES = 16


def open_stores(
    settings: StoreSettings, layout: KvLayout, model_fingerprint: bytes, allocate: Allocate = private_rows
) -> list[KvStore]:
    """Open the local and the shared store of a worker, as far as it has them.

    `allocate` returns memory for fetches. Raises StartError naming the setting.
    """
    local = open_local_store(settings, layout, model_fingerprint, allocate)
    shared = open_shared_store(settings, layout, model_fingerprint, allocate)
    return [store for store in (local, shared) if store is not None]


def open_shared_store(
    settings: StoreSettings, layout: KvLayout, model_fingerprint: bytes, allocate: Allocate = private_rows
) -> BlockStore | None:
    """Open the store, or return None without one.

    `allocate` returns memory for fetches. Raises StartError naming kv_store or kv_store_secret_file.
    """
    if not settings.kv_store:
        return None
    secret = secret_of(settings.kv_store_secret_file)
    object_format = ObjectFormat(layout.block_bytes, layout.kv_heads, model_fingerprint, secret)
    try:
        objects = _objects(settings, object_format)
    except (StoreError, ImportError) as error:
        raise StartError("kv_store", str(error)) from error
    return BlockStore(objects, object_format, settings.kv_store_writes == "computed", allocate=allocate)


def _objects(settings: StoreSettings, object_format: ObjectFormat) -> Objects:
    url = urlsplit(settings.kv_store)
    if url.scheme == "s3":
        return BucketObjects(url.netloc, url.path)
    return FolderObjects(Path(settings.kv_store), object_format.object_bytes, settings.kv_store_gib * GIB, STALE_S)


def secret_of(path: Path | None) -> bytes:
    """Return the key of checksums made of a file's bytes; empty without a file."""
    if path is None:
        return b""
    try:
        content = path.read_bytes().strip()
    except OSError as error:
        raise StartError("kv_store_secret_file", f"{path}: {error.strerror}") from error
    if len(content) < MIN_SECRET_BYTES:
        raise StartError("kv_store_secret_file", f"{path} has fewer than {MIN_SECRET_BYTES} bytes")
    return blake2b(content, digest_size=64).digest()
