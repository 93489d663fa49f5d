"""File system calls in an order that survives a crash at any of them.

Files are readable by their owner only, since they hold prompts and answers.
"""

import os
import secrets
from pathlib import Path

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
