"""Stored files of all tenants."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from batches.records import FileInfo
from batches.storage.disk import TEMPORARY, Disk
from batches.storage.layout import FILE_PREFIX, is_id, new_id, tenant_folder, tenant_folders

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
