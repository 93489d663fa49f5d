"""The tier on disk: one file of fixed slots per engine process, found again after a restart.

Files lie in `<disk_dir>/<first 16 hex digits of the model fingerprint>-<block_bytes>/kv-<n>.blocks`. Each process
locks the first one that nobody else has (flock), with all that a dead process left there. Models come and go: a file of
another one that nobody has, and that was not written for STALE_S, is removed when a process starts.

What a file promises. A slot is overwritten in three steps: its header is zeroed, the payload is written, the new
header is written. A process that dies in between, kill -9 included, therefore leaves no valid header over bytes that
are not its block's, because the system keeps what was written in order. After a power cut or a crash of the system
nothing is promised: pages reach the disk in any order, nothing here is fsynced, and a valid header may stand over
anything. So whoever reads a block must compare the fingerprint of what it read with the stored one
(`kvtransfer/fingerprint.py`) before anything uses it, and say `Tiers.forget` where they differ.
"""

import fcntl
import logging
import os
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
"""Processes of one host that share a directory."""
STALE_S = 7 * 24 * 3600.0
log = logging.getLogger(__name__)


class DiskTier:
    """`slots` are the books; `write`, `erase` and `read` do the I/O and touch no books."""

    def __init__(
        self, disk_dir: Path, disk_bytes: int, block_bytes: int, kv_heads: int, model_fingerprint: bytes
    ) -> None:
        """Takes a file over, or makes one, of at most `disk_bytes`. Raises EngineStartError naming kv_disk_mib or
        kv_disk_dir."""
        self._format = DiskFormat(block_bytes, kv_heads)
        num_slots = self._format.slots_within(disk_bytes)
        if num_slots == 0:
            raise EngineStartError("kv_disk_mib", f"less than one KV block of {block_bytes} bytes and its header")
        directory = disk_dir / f"{model_fingerprint.hex()[:16]}-{block_bytes}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd, self.path = _lock_one(directory)
            _remove_stale(disk_dir, directory)
        except OSError as error:
            raise EngineStartError("kv_disk_dir", f"{directory}: {error.strerror}") from error
        self.num_refused = 0
        """Slots whose headers were torn, or whose payloads were cut off, when the file was opened."""
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
        """Raises OSError; then the slot is empty, or as it was if not even its header could be zeroed."""
        self.erase(slot)
        self._write_all(payload.data, self._format.payload_offset(slot))
        packed = self._format.pack_header(slot, header)
        self._write_all(memoryview(packed), self._format.header_offset(slot))

    def erase(self, slot: int) -> None:
        """A slot that no restart will find. Raises OSError."""
        self._write_all(memoryview(bytes(self._format.header_bytes)), self._format.header_offset(slot))

    def read(self, slot: int, into: NDArray[np.uint8]) -> None:
        """Fill `into`, [block_bytes], with a slot's payload. Raises TransferError."""
        left, offset = into.data, self._format.payload_offset(slot)
        while left:
            try:
                count = os.preadv(self._fd, [left], offset)
            except OSError as error:
                raise TransferError(f"{self.path}: {error.strerror}") from error
            if count == 0:
                raise TransferError(f"{self.path} ends within slot {slot}")
            left, offset = left[count:], offset + count

    def close(self) -> None:
        """Leave the file to the next process. Nothing may be reading or writing."""
        with suppress(OSError):
            os.utime(self._fd)
        os.close(self._fd)

    def _open(self, num_slots: int, model_fingerprint: bytes) -> None:
        """A superblock that says `num_slots`, and no more bytes than they take."""
        page = os.pread(self._fd, SUPERBLOCK_BYTES, 0)
        if page and (fault := self._format.superblock_fault(page, model_fingerprint)):
            log.warning("%s is started afresh: %s", self.path, fault)
            page = b""
        if not page:
            os.ftruncate(self._fd, 0)
        end = self._format.payload_offset(num_slots - 1) + self._format.payload_stride
        if os.fstat(self._fd).st_size > end:
            os.ftruncate(self._fd, end)
        self._write_all(memoryview(self._format.pack_superblock(num_slots, model_fingerprint)), 0)

    def _load(self, num_slots: int) -> list[tuple[int, SlotHeader]]:
        """What the slots hold, oldest first. Every slot that is not returned has an empty header afterwards."""
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
        return sorted(newest.values(), key=lambda found: found[1].generation)

    def _headers(self, num_slots: int) -> list[tuple[int, bytes]]:
        """Packed headers of the slots that are not empty; those at the file's end may be cut off."""
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
    """The first file that no other process has locked. Raises OSError."""
    for number in range(MAX_FILES):
        path = directory / f"kv-{number}.blocks"
        # Readable by its owner only: from KV one can tell what the prompts were.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
        except OSError:
            os.close(fd)
            raise
        else:
            if os.fstat(fd).st_nlink:
                return fd, path
            os.close(fd)  # it was removed in this moment
    raise OSError(0, f"all {MAX_FILES} files are in use")


def _remove_stale(disk_dir: Path, own: Path) -> None:
    """Files that nobody has locked and nobody has written for long, but for those in `own`."""
    for path in disk_dir.glob("*-*/kv-*.blocks"):
        with suppress(OSError):  # it is locked, or another process removes it
            if path.parent == own or time.time() - path.stat().st_mtime < STALE_S:
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                log.info("%s is removed: nobody has used it for %.0f days", path, STALE_S / 86400)
            finally:
                os.close(fd)
