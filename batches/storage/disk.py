"""File system calls in an order that survives a crash at any of them.

Files are readable by their owner only, since they hold prompts and answers.

Layout of the batches folder, and names in it. Pure.

FOLDER/tenant-NAME/files/file-ID.data, .json        a file, visible while it has its record
FOLDER/tenant-NAME/batches/batch_ID/*.json          records of a batch (`state.py`)
                                   input.jsonl      second name of its input: it outlives the file's deletion
                                   answers-N.jsonl  logs, one for each router that had the batch
                                   lock             held by the router that runs it

Space on disk that a tenant's files may take, while several are being written. Pure.
"""

import hashlib
import os
import re
import secrets
from collections import Counter
from pathlib import Path
from urllib.parse import quote

from cluster.errors import InvalidRequest, StartError

FILE_MODE, FOLDER_MODE = 0o600, 0o700
TEMPORARY = ".tmp"
"""Ending of files that are not whole yet."""


class Disk:
    """File system; tests replace its single calls by ones that crash."""

    # ------------------------------------------------------------------ single calls

    def open_new(self, path: Path) -> int:
        """Return a descriptor of a file that must not exist.

        Raises FileExistsError.
        """
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    def write(self, fd: int, content: bytes) -> None:
        """Write all of the content."""
        left = memoryview(content)
        while left:
            left = left[os.write(fd, left) :]

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name.

        Raises FileExistsError.
        """
        os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file; one that is gone already is no error."""
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)

    # ------------------------------------------------------------------ made of them

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder survive a loss of power."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        finally:
            os.close(fd)

    def write_once(self, path: Path, content: bytes) -> bool:
        """Create a file, whole or not at all; return False where it exists already."""
        beside = self._write_beside(path, content)
        try:
            self.link(beside, path)
        except FileExistsError:
            return False
        finally:
            self.remove(beside)
        self.sync_folder(path.parent)
        return True

    def replace(self, path: Path, content: bytes) -> None:
        """Create or replace a file, whole or not at all."""
        self.rename(self._write_beside(path, content), path)

    def publish(self, whole: Path, path: Path) -> None:
        """Give a synced file its final name."""
        self.rename(whole, path)
        self.sync_folder(path.parent)

    def _write_beside(self, path: Path, content: bytes) -> Path:
        beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
        fd = self.open_new(beside)
        try:
            self.write(fd, content)
            self.sync(fd)
        finally:
            os.close(fd)
        return beside


MAX_NAME_CHARS = 200
"""Longest tenant name that is used as it is; file systems allow 255 bytes."""
FILE_PREFIX, BATCH_PREFIX = "file-", "batch_"
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


def tenant_folder(root: Path, tenant: str) -> Path:
    name = quote(tenant, safe="")
    if len(name) > MAX_NAME_CHARS:
        name = f"#{hashlib.sha256(tenant.encode()).hexdigest()}"  # quoted names have no such sign
    return root / f"tenant-{name}"


def tenant_folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.name.startswith("tenant-")]


def new_id(prefix: str, now: float) -> str:
    """Return an id nobody can guess; ids sort by time."""
    return f"{prefix}{_time_part(now)}{secrets.token_hex(10)}"


def derived_id(prefix: str, at: float, *parts: str) -> str:
    """Return the same id for the same arguments."""
    return f"{prefix}{_time_part(at)}{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:20]}"


def is_id(text: str, prefix: str) -> bool:
    """Return whether a text may be an id: only then it is used in a path."""
    return text.startswith(prefix) and _ID.fullmatch(text) is not None


def _time_part(at: float) -> str:
    return f"{int(at * 1000) & (1 << 48) - 1:012x}"


class TenantSpace:
    """Bound on the bytes of each tenant's files and batches."""

    def __init__(self, max_mib: int) -> None:
        self._max_mib = max_mib
        self._settled: dict[str, int] = {}
        """Bytes on disk besides files that this process is writing, by tenant with such files."""
        self._incoming: Counter[str] = Counter()
        """Bytes of files that this process is writing."""
        self._num_writing: Counter[str] = Counter()

    def begin(self, tenant: str, on_disk: int) -> None:
        """Begin a file; `on_disk` are all bytes of the tenant now."""
        self._num_writing[tenant] += 1
        self._settled[tenant] = max(0, on_disk - self._incoming[tenant])

    def take(self, tenant: str, num_bytes: int) -> None:
        """Count bytes of a file.

        Raises InvalidRequest for bytes beyond the limit, which are not counted.
        """
        if self._settled[tenant] + self._incoming[tenant] + num_bytes > self._max_mib << 20:
            limit = f"{self._max_mib} MiB of files and batches (max_files_mib_per_tenant): delete some files"
            raise InvalidRequest("file", f"tenant {tenant!r} may have {limit}")
        self._incoming[tenant] += num_bytes

    def end(self, tenant: str, num_bytes: int, is_kept: bool) -> None:
        """End a file of so many counted bytes."""
        self._incoming[tenant] -= num_bytes
        self._settled[tenant] += num_bytes if is_kept else 0
        self._num_writing[tenant] -= 1
        if not self._num_writing[tenant]:
            del self._num_writing[tenant], self._incoming[tenant], self._settled[tenant]


def check_folder(root: Path, disk: Disk) -> None:
    """Create the folder and try all calls that are needed there.

    Raises StartError where one of them fails.
    """
    try:
        disk.make_folder(root)
        probe = root / "probe"
        disk.remove(probe)
        disk.write_once(probe, b"")
        disk.remove(probe)
    except OSError as error:
        raise StartError("batches_folder", f"cannot be used: {root}: {error.strerror}") from None
