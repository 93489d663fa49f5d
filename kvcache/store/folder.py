"""Objects as files of a folder that workers share: a local disk, NFS, Lustre, a volume of Kubernetes.

Bounds without a central lock: the keys are hashes, so each of the folders of a model gets an equal share of the bytes.
A writer counts the folder that it writes into when its own count says that it is full, and every COUNT_EVERY_S, and
removes the files used longest ago. Together, writers exceed the bound by what they write between two counts. A file's
modification time is the time of its last use.
"""

import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from kvcache.store.kv_store import LocalObjects, ObjectMissing, PlaceUse, ReadFailure, StoreError

COUNT_EVERY_S = 5.0
COUNTING_SHARE = 0.05
"""Largest share of a writer's time that goes into counting, which is slow with many files on a network."""
SURPLUS_PART = 16
"""Part of a full folder that is emptied at once, one sixteenth, so that not every write counts the files."""
ABANDONED_S = 3600.0
"""Age at which a file that its writer has not finished is removed."""
TOUCH_EVERY_S = 60.0
"""Age of a file's time of use from which it is renewed in a shared folder, whose server would see every read."""
IDENTITY_FILE = "tandem-store"
UNFINISHED = ".part-"


class FolderObjects(LocalObjects):
    """Files of `object_bytes` below `root`.

    Readable by this user only: KV reveals prompts. No link is followed.
    """

    reads_at_once = 16

    def __init__(
        self,
        root: Path,
        object_bytes: int,
        max_bytes: int,
        max_age_s: float,
        clock: Callable[[], float] = time.time,
        num_folders: int = 256,
        place: str = "",
    ) -> None:
        """Open the folder, which is created where it is missing.

        `max_bytes` bounds all objects of one model, which are in `num_folders` folders. Objects not used for
        `max_age_s` are removed. `clock` returns the time of day in seconds. `place` is the name of a local place.
        Raises StoreError.
        """
        self._root = root
        self._object_bytes = object_bytes
        self._num_folders = num_folders
        self._max_files = max(1, max_bytes // object_bytes // num_folders)
        self._max_age_s = max_age_s
        self._place = place
        self._touch_every_s = 0.0 if place else TOUCH_EVERY_S
        self._num_read = 0
        self._clock = clock
        self._writer = uuid4().hex[:12]
        self._numbers = count()
        self._counts: dict[str, _Count] = {}
        self._lock = Lock()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.identity = f"folder:{_identity(root)}"
        except OSError as error:
            raise StoreError(f"{root}: {error.strerror}") from error

    def held(self, names: Sequence[str]) -> list[bool]:
        return [self._is_held(name) for name in names]

    def read(self, names: Sequence[str], into: Sequence[NDArray[np.uint8]]) -> list[ReadFailure | None]:
        return [self._read(name, row) for name, row in zip(names, into, strict=True)]

    def write(self, name: str, stored: NDArray[np.uint8]) -> None:
        path = self._root / name
        unfinished = path.parent / f"{UNFINISHED}{self._writer}-{next(self._numbers)}"
        try:
            try:
                fd = _create(unfinished)
            except FileNotFoundError:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                fd = _create(unfinished)
            try:
                left = stored.data
                while left:
                    left = left[os.write(fd, left) :]
            finally:
                os.close(fd)
            if self._place:  # the system's own time of a write is the same for many of them
                os.utime(unfinished, 2 * (self._clock(),))
            unfinished.replace(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise StoreError(f"{path}: {error.strerror}") from error

    def remove(self, name: str) -> None:
        try:
            (self._root / name).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{name}: {error.strerror}") from error

    def used(self, name: str) -> None:
        now = self._clock()
        with suppress(OSError):  # the file was evicted, or belongs to a read-only folder
            path = self._root / name
            if now - path.lstat().st_mtime >= self._touch_every_s:
                os.utime(path, (now, now), follow_symlinks=False)

    def trim(self, name: str) -> list[str]:
        folder = name.rpartition("/")[0]
        with self._lock:
            counted = self._counts.setdefault(folder, _Count())
            counted.num_files += 1
            if counted.num_files <= self._max_files and time.monotonic() < counted.again_at:
                return []
            counted.again_at = math.inf  # other threads do not count meanwhile
            counted.num_files = 0
        try:
            return self._count(folder, counted)
        except OSError as error:
            counted.again_at = time.monotonic() + COUNT_EVERY_S
            raise StoreError(f"{folder}: {error.strerror}") from error

    def heads(self, folder: str, num_bytes: int) -> Iterator[tuple[str, bytes]]:
        try:
            names = [name for name in os.listdir(self._root / folder) if not name.startswith(UNFINISHED)]
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"{folder}: {error.strerror}") from error
        with self._lock:
            self._counts.setdefault(folder, _Count()).num_files += len(names)
        for name in names:
            row = np.empty(num_bytes, np.uint8)
            if self._fill(f"{folder}/{name}", row) is None:
                yield f"{folder}/{name}", row.tobytes()

    def places(self) -> list[PlaceUse]:
        with self._lock:
            used = min(self._max_files, sum(counted.num_files for counted in self._counts.values()))
            return [PlaceUse(self._place, self._max_files * self._num_folders, used, self._num_read)]

    def _count(self, folder: str, counted: "_Count") -> list[str]:
        """Count a folder's files and remove those beyond the bounds; return the names of removed objects."""
        began, now = time.monotonic(), self._clock()
        files: list[tuple[float, str]] = []
        with os.scandir(self._root / folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another writer removed it
                    used_at = entry.stat(follow_symlinks=False).st_mtime
                    if not entry.name.startswith(UNFINISHED):
                        files.append((used_at, entry.name))
                    elif now - used_at > ABANDONED_S:
                        (self._root / folder / entry.name).unlink(missing_ok=True)
        files.sort()
        kept = self._max_files - self._max_files // SURPLUS_PART
        surplus = len(files) - kept if len(files) > self._max_files else 0
        gone = [file for at, (used_at, file) in enumerate(files) if at < surplus or now - used_at > self._max_age_s]
        for file in gone:
            (self._root / folder / file).unlink(missing_ok=True)
        ended = time.monotonic()
        with self._lock:
            counted.num_files += len(files) - len(gone)
            counted.again_at = ended + max(COUNT_EVERY_S, (ended - began) * self._num_folders / COUNTING_SHARE)
        return [f"{folder}/{file}" for file in gone]

    def _is_held(self, name: str) -> bool:
        try:
            status = (self._root / name).lstat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"{name}: {error.strerror}") from error
        return stat.S_ISREG(status.st_mode) and status.st_size == self._object_bytes

    def _read(self, name: str, into: NDArray[np.uint8]) -> ReadFailure | None:
        if (failure := self._fill(name, into)) is None:
            with self._lock:
                self._num_read += 1
        return failure

    def _fill(self, name: str, into: NDArray[np.uint8]) -> ReadFailure | None:
        """Read the first bytes of a file that is whole."""
        try:
            fd = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return ObjectMissing(name)
        except OSError as error:
            return StoreError(f"{name}: {error.strerror}")
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size != self._object_bytes:
                return ObjectMissing(f"{name} is not a file of {self._object_bytes} bytes")
            left, offset = into.data, 0
            while left:
                num_read = os.preadv(fd, [left], offset)
                if num_read == 0:
                    return ObjectMissing(f"{name} ends after {offset} bytes")
                left, offset = left[num_read:], offset + num_read
        except OSError as error:
            return StoreError(f"{name}: {error.strerror}")
        finally:
            os.close(fd)
        return None


@dataclass(slots=True)
class _Count:
    """Last count of a folder."""

    num_files: int = 0
    """Files then, and those that this writer has written since."""
    again_at: float = 0.0
    """Monotonic time from which the folder is counted again, since others write too."""


def _identity(root: Path) -> str:
    """Return the random name that the folder's first user gave it; the same path of two hosts may be two folders."""
    path, own = root / IDENTITY_FILE, uuid4().hex
    unfinished = root / f"{UNFINISHED}{own}"
    unfinished.write_text(own)
    try:
        os.link(unfinished, path)  # fails where the file exists, and shows it whole at once
    except FileExistsError:
        return path.read_text()[:64]
    finally:
        unfinished.unlink()
    return own


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
