"""The disk tier: one file of fixed slots per engine process, found again after a restart.

Files lie in `<disk_dir>/<first 16 hex digits of the model fingerprint>-<block_bytes>/kv-<n>.blocks`. Each process locks
the first file that no other process holds (flock), with all that a dead process left there. A file of another model
that no process holds, and that was not written for STALE_S, is removed when a process starts.

Guarantee of a file: a slot is overwritten in three steps. Its header is zeroed, the payload is written, the new header
is written. So a process that dies in between, kill -9 included, leaves no valid header over bytes of another block,
because the system keeps the order of writes. After a power cut or a system crash nothing is guaranteed: pages reach the
disk in any order, nothing is fsynced, and a valid header may stand over any bytes. So every reader must compare the
fingerprint of the bytes with the stored one (`kvtransfer/fingerprint.py`) before using them, and call `Tiers.forget`
where they differ.
"""

import fcntl
import logging
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineStartError
from engine.kv.tiers.disk_format import SUPERBLOCK_BYTES, DiskFormat, SlotHeader
from engine.kv.tiers.slots import Slots
from kvtransfer.errors import TransferError

MAX_FILES = 1024
"""Largest number of processes of one host that share a directory."""
STALE_S = 7 * 24 * 3600.0
log = logging.getLogger(__name__)


class DiskTier:
    """Disk tier.

    `slots` has its records; `write`, `erase` and `read` do I/O and touch no records.
    """

    def __init__(
        self, disk_dir: Path, disk_bytes: int, block_bytes: int, kv_heads: int, model_fingerprint: bytes
    ) -> None:
        """Take over a file, or create one, of at most `disk_bytes`.

        Raises EngineStartError naming kv_disk_mib or kv_disk_dir.
        """
        self._format = DiskFormat(block_bytes, kv_heads)
        num_slots = self._format.slots_within(disk_bytes)
        if num_slots == 0:
            raise EngineStartError("kv_disk_mib", f"is less than one KV block of {block_bytes} bytes with its header")
        directory = disk_dir / f"{model_fingerprint.hex()[:16]}-{block_bytes}"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd, self.path = _lock_one(directory)
            _remove_stale(disk_dir, directory)
        except OSError as error:
            raise EngineStartError("kv_disk_dir", f"{directory}: {error.strerror}") from error
        self.num_refused = 0
        """Slots with torn headers or truncated payloads found when the file was opened."""
        try:
            self._open(num_slots, model_fingerprint)
            headers = self._load(num_slots)
        except OSError as error:
            os.close(self._fd)
            raise EngineStartError("kv_disk_dir", f"{self.path}: {error.strerror}") from error
        self.next_generation = headers[-1][1].generation + 1 if headers else 0
        self.slots = Slots(num_slots, [(slot, header.block) for slot, header in headers])
        if headers or self.num_refused:
            log.info("%s: found %d blocks, refused %d", self.path, len(headers), self.num_refused)

    def write(self, slot: int, header: SlotHeader, payload: NDArray[np.uint8]) -> None:
        """Write a slot.

        Raises OSError; then the slot is empty, or unchanged if not even its header could be zeroed.
        """
        self.erase(slot)
        self._write_all(payload.data, self._format.payload_offset(slot))
        packed = self._format.pack_header(slot, header)
        self._write_all(memoryview(packed), self._format.header_offset(slot))

    def erase(self, slot: int) -> None:
        """Empty a slot, so that no restart finds it.

        Raises OSError.
        """
        self._write_all(memoryview(bytes(self._format.header_bytes)), self._format.header_offset(slot))

    def read(self, slot: int, into: NDArray[np.uint8]) -> None:
        """Fill `into`, [block_bytes], with a slot's payload.

        Raises TransferError.
        """
        left, offset = into.data, self._format.payload_offset(slot)
        while left:
            try:
                count = os.preadv(self._fd, [left], offset)
            except OSError as error:
                raise TransferError(f"{self.path}: {error.strerror}") from error
            if count == 0:
                raise TransferError(f"{self.path} ends within slot {slot}")
            left, offset = left[count:], offset + count

    def payload_offset(self, slot: int) -> int:
        """Return the offset of a slot's payload in the file."""
        return self._format.payload_offset(slot)

    def close(self) -> None:
        """Unlock the file for the next process.

        No read or write may be running.
        """
        with suppress(OSError):
            os.utime(self._fd)
        os.close(self._fd)

    def _open(self, num_slots: int, model_fingerprint: bytes) -> None:
        """Write a superblock with `num_slots` and truncate the file to their size."""
        page = os.pread(self._fd, SUPERBLOCK_BYTES, 0)
        if page and (fault := self._format.superblock_fault(page, model_fingerprint)):
            log.warning("%s is started empty: %s", self.path, fault)
            page = b""
        if not page:
            os.ftruncate(self._fd, 0)
        end = self._format.payload_offset(num_slots - 1) + self._format.payload_stride
        if os.fstat(self._fd).st_size > end:
            os.ftruncate(self._fd, end)
        self._write_all(memoryview(self._format.pack_superblock(num_slots, model_fingerprint)), 0)

    def _load(self, num_slots: int) -> list[tuple[int, SlotHeader]]:
        """Return the blocks in the slots, oldest first; all other slots have an empty header afterwards."""
        newest: dict[bytes, tuple[int, SlotHeader]] = {}
        size = os.fstat(self._fd).st_size
        for slot, packed in self._headers(num_slots):
            header = self._format.unpack_header(slot, packed)
            if header is None or self._format.payload_offset(slot) + self._format.block_bytes > size:
                self.num_refused += 1
                self.erase(slot)
                continue
            # A process that died may have left a block in two slots: evicted, then put again into another one.
            other = newest.get(header.block.key)
            if other is None or other[1].generation < header.generation:
                newest[header.block.key] = slot, header
            if other is not None:
                self.erase(slot if newest[header.block.key] is other else other[0])
        return sorted(newest.values(), key=lambda entry: entry[1].generation)

    def _headers(self, num_slots: int) -> list[tuple[int, bytes]]:
        """Return packed headers of non-empty slots; those at the file's end may be truncated."""
        headers = []
        width, per_group = self._format.header_bytes, self._format.slots_per_group
        for first in range(0, num_slots, per_group):
            area = os.pread(self._fd, self._format.area_bytes, self._format.header_offset(first))
            if not area.strip(b"\0"):
                continue
            for slot in range(first, min(first + per_group, num_slots)):
                packed = area[(slot - first) * width :][:width]
                if packed.strip(b"\0"):
                    headers.append((slot, packed))
        return headers

    def _write_all(self, left: memoryview, offset: int) -> None:
        while left:
            count = os.pwrite(self._fd, left, offset)
            left, offset = left[count:], offset + count


def _lock_one(directory: Path) -> tuple[int, Path]:
    """Lock and return the first file that no other process has locked.

    Raises OSError.
    """
    for number in range(MAX_FILES):
        path = directory / f"kv-{number}.blocks"
        # Readable by its owner only: KV reveals the prompts. A link could lead to any file of this user.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            _check_own(fd, path)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
        except OSError:
            os.close(fd)
            raise
        else:
            if os.fstat(fd).st_nlink:
                return fd, path
            os.close(fd)  # the file was removed at this moment
    raise OSError(0, f"all {MAX_FILES} files are in use")


def _check_own(fd: int, path: Path) -> None:
    """Check that a file is a plain one of this user, and take it from the others.

    Raises OSError.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(0, f"{path} is not a regular file of this user")
    if stat.S_IMODE(status.st_mode) != 0o600:
        os.fchmod(fd, 0o600)


def _remove_stale(disk_dir: Path, own: Path) -> None:
    """Remove files outside `own` that are unlocked and were not written for STALE_S."""
    for path in disk_dir.glob("*-*/kv-*.blocks"):
        with suppress(OSError):  # the file is locked, or another process removes it
            if path.parent == own or time.time() - path.stat().st_mtime < STALE_S:
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                log.info("%s is removed: it was not used for %.0f days", path, STALE_S / 86400)
            finally:
                os.close(fd)
