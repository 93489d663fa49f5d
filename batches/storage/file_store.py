"""Stored files and batches of all tenants: their records, and the files of batches that run."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from batches.state import Cancelled, Checked, Decided, Ended, Facts, FileInfo, Made, Progress, Record
from batches.storage.disk import (
    BATCH_PREFIX,
    FILE_PREFIX,
    TEMPORARY,
    Disk,
    is_id,
    new_id,
    tenant_folder,
    tenant_folders,
)
from cluster.errors import InvalidRequest, Overloaded

MAX_OPEN_PER_TENANT = 100
"""Batches of a tenant that have not ended."""
STALE_S = 86_400.0
"""Age from which a file without a record belongs to a process that died, in seconds."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file, and where its content lies."""

    info: FileInfo
    content: Path


class FileStore:
    """Files in a folder, which several processes may use; all calls are blocking."""

    def __init__(self, root: Path, disk: Disk, clock: Callable[[], float]) -> None:
        self._root = root
        self._disk = disk
        self._clock = clock

    def new_file(self, tenant: str) -> "NewFile":
        """Return a file to be written."""
        folder = self._folder(tenant)
        self._disk.make_folder(folder)
        return NewFile(self._disk, folder / f"{new_id(FILE_PREFIX, self._clock())}{TEMPORARY}")

    def add(self, new: "NewFile", info: FileInfo) -> StoredFile:
        """Publish a file that is complete; one that exists already is replaced by its equal."""
        folder = self._folder(info.tenant)
        content = folder / f"{info.id}.data"
        new.publish(content)
        self._disk.write_once(folder / f"{info.id}.json", info.model_dump_json().encode())
        return StoredFile(info, content)

    def find(self, file_id: str, tenant: str | None) -> StoredFile | None:
        """Return a file of a tenant, or of any tenant."""
        if not is_id(file_id, FILE_PREFIX):
            return None
        return next(filter(None, (self._read(folder, file_id) for folder in self._folders(tenant))), None)

    def ids(self, tenant: str | None) -> list[str]:
        """Return ids of a tenant's files, or of all, the oldest first."""
        names = [path.stem for folder in self._folders(tenant) for path in folder.glob(f"{FILE_PREFIX}*.json")]
        return sorted(file_id for file_id in names if is_id(file_id, FILE_PREFIX))

    def delete(self, file: StoredFile) -> None:
        self._disk.remove(file.content.with_suffix(".json"))
        self._disk.remove(file.content)

    def used_bytes(self, tenant: str) -> int:
        """Return the bytes of a tenant's files and batches; a file with two names counts once."""
        sizes: dict[int, int] = {}
        for folder, _, names in os.walk(tenant_folder(self._root, tenant)):
            for name in names:
                try:
                    at = os.stat(os.path.join(folder, name))
                except FileNotFoundError:
                    continue  # it was removed meanwhile
                sizes[at.st_ino] = at.st_size
        return sum(sizes.values())

    def clean(self) -> None:
        """Remove files that expired, and what processes that died have left."""
        now = self._clock()
        for folder in self._folders(None):
            for path in folder.iterdir():
                if path.suffix == ".json":
                    self._read(folder, path.stem)  # removes one that expired
                elif not path.with_suffix(".json").exists() and _age_s(path, now) > STALE_S:
                    self._disk.remove(path)

    def _read(self, folder: Path, file_id: str) -> StoredFile | None:
        try:
            info = FileInfo.model_validate_json((folder / f"{file_id}.json").read_bytes())
        except FileNotFoundError:
            return None
        file = StoredFile(info, folder / f"{file_id}.data")
        if info.expires_at is not None and info.expires_at <= self._clock():
            self.delete(file)
            return None
        return file

    def _folder(self, tenant: str) -> Path:
        return tenant_folder(self._root, tenant) / "files"

    def _folders(self, tenant: str | None) -> list[Path]:
        tenants = tenant_folders(self._root) if tenant is None else [tenant_folder(self._root, tenant)]
        return [folder for each in tenants if (folder := each / "files").is_dir()]


class NewFile:
    """File that is being written, under a name that no reader sees."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._file: BinaryIO = open(disk.open_new(path), "wb", buffering=0)  # noqa: SIM115 # closed below
        self.num_bytes = 0

    @property
    def id(self) -> str:
        return self._path.name.removesuffix(TEMPORARY)

    def write(self, content: bytes) -> None:
        self._disk.write(self._file.fileno(), content)
        self.num_bytes += len(content)

    def publish(self, path: Path) -> None:
        """Sync the file and give it its final name."""
        self._disk.sync(self._file.fileno())
        self._file.close()
        self._disk.publish(self._path, path)

    def discard(self) -> None:
        """Remove the file unless it was published."""
        self._file.close()
        self._disk.remove(self._path)


def _age_s(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


AnyRecord = TypeVar("AnyRecord", bound=Record)
NAMES: dict[type[Record], str] = {
    Made: "made.json",
    Checked: "checked.json",
    Cancelled: "cancelled.json",
    Decided: "decided.json",
    Ended: "ended.json",
}
PROGRESS = "progress.json"
RETRY_FULL_S = 60.0
"""Advice in seconds where a tenant has too many open batches."""


class BatchFolder:
    """Folder of one batch."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self.input = path / "input.jsonl"
        self.lock = path / "lock"

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def tenant_key(self) -> str:
        """Name of the tenant's folder."""
        return self.path.parent.parent.name

    def facts(self) -> Facts | None:
        """Return all records, or None before the batch is made whole."""
        # The last record first: each implies those before it, so that what is returned was true at one time.
        ended, decided = self._read(Ended), self._read(Decided)
        cancelled, checked = self._read(Cancelled), self._read(Checked)
        made = self._read(Made)
        if made is None:
            return None
        return Facts(made=made, checked=checked, cancelled=cancelled, decided=decided, ended=ended)

    def is_cancelled(self) -> bool:
        return (self.path / NAMES[Cancelled]).exists()

    def has_ended(self) -> bool:
        return (self.path / NAMES[Ended]).exists()

    def record(self, record: Record) -> None:
        """Record a fact, unless another process was first."""
        self._disk.write_once(self.path / NAMES[type(record)], record.model_dump_json().encode())

    def progress(self) -> Progress:
        try:
            return Progress.model_validate_json((self.path / PROGRESS).read_bytes())
        except FileNotFoundError:
            return Progress()

    def show_progress(self, progress: Progress) -> None:
        self._disk.replace(self.path / PROGRESS, progress.model_dump_json().encode())

    def logs(self) -> list[Path]:
        """Return the logs, the oldest first."""
        return sorted(self.path.glob("answers-*.jsonl"), key=_number_of)

    def new_log(self) -> tuple[Path, int]:
        """Create the log after all others; return its path and descriptor."""
        while True:
            logs = self.logs()
            path = self.path / f"answers-{_number_of(logs[-1]) + 1 if logs else 0}.jsonl"
            try:
                fd = self._disk.open_new(path)
            except FileExistsError:
                continue  # another process believes to have the batch too
            self._disk.sync_folder(self.path)
            return path, fd

    def clean(self) -> None:
        """Remove all that an ended batch does not need."""
        kept = {*NAMES.values()}
        for path in self.path.iterdir():
            if path.name not in kept:
                self._disk.remove(path)

    def _read(self, kind: type[AnyRecord]) -> AnyRecord | None:
        try:
            return kind.model_validate_json((self.path / NAMES[kind]).read_bytes())
        except FileNotFoundError:
            return None


class BatchStore:
    """Batches in a folder, which several processes may use; all calls are blocking."""

    def __init__(
        self, root: Path, disk: Disk, clock: Callable[[], float], max_open_per_tenant: int = MAX_OPEN_PER_TENANT
    ) -> None:
        self._root = root
        self._disk = disk
        self._max_open_per_tenant = max_open_per_tenant
        self._clock = clock
        self._over: set[str] = set()
        """Ids of batches that are known to have ended."""

    def make(self, made: Made, content: Path) -> BatchFolder:
        """Create a batch of an input.

        Raises Overloaded where the tenant has too many, InvalidRequest where the input was deleted meanwhile.
        """
        if sum(1 for _ in self.open_of(made.tenant)) >= self._max_open_per_tenant:
            limit = f"{self._max_open_per_tenant} batches that have not ended"
            raise Overloaded(f"tenant {made.tenant!r} may have {limit}", retry_after_s=RETRY_FULL_S)
        folder = BatchFolder(self._folder(made.tenant) / made.id, self._disk)
        self._disk.make_folder(folder.path)
        try:
            self._disk.link(content, folder.input)
        except FileNotFoundError:
            raise InvalidRequest("input_file_id", "was deleted meanwhile") from None
        folder.record(made)
        self._disk.sync_folder(folder.path.parent)
        return folder

    def find(self, batch_id: str, tenant: str | None) -> BatchFolder | None:
        """Return a batch of a tenant, or of any tenant."""
        if not is_id(batch_id, BATCH_PREFIX):
            return None
        for folder in self._folders(tenant):
            if (folder / batch_id / NAMES[Made]).exists():
                return BatchFolder(folder / batch_id, self._disk)
        return None

    def ids(self, tenant: str | None) -> list[str]:
        """Return ids of a tenant's batches, or of all, the oldest first."""
        names = [path.parent.name for folder in self._folders(tenant) for path in folder.glob(f"*/{NAMES[Made]}")]
        return sorted(batch_id for batch_id in names if is_id(batch_id, BATCH_PREFIX))

    def open_of(self, tenant: str | None) -> list[BatchFolder]:
        """Return the batches that have not ended, the oldest first; what others have left is removed."""
        batches = []
        for folder in self._folders(tenant):
            for path in folder.iterdir():
                if path.name in self._over or not is_id(path.name, BATCH_PREFIX):
                    continue
                batch = BatchFolder(path, self._disk)
                if batch.has_ended():
                    batch.clean()
                    self._over.add(batch.id)
                elif (path / NAMES[Made]).exists():
                    batches.append(batch)
        return sorted(batches, key=lambda batch: batch.id)

    def clean(self) -> None:
        """Remove batches that a process which died has not made whole."""
        for folder in self._folders(None):
            for path in folder.iterdir():
                if not (path / NAMES[Made]).exists() and self._clock() - path.stat().st_mtime > STALE_S:
                    BatchFolder(path, self._disk).clean()
                    path.rmdir()

    def _folder(self, tenant: str) -> Path:
        return tenant_folder(self._root, tenant) / "batches"

    def _folders(self, tenant: str | None) -> list[Path]:
        tenants = tenant_folders(self._root) if tenant is None else [tenant_folder(self._root, tenant)]
        return [folder for each in tenants if (folder := each / "batches").is_dir()]


def _number_of(log: Path) -> int:
    return int(log.stem.removeprefix("answers-"))
