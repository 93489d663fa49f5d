"""Writer of JSON lines on a thread.

Lines beyond its speed are dropped and counted.
"""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from cluster.errors import StartError

log = logging.getLogger(__name__)


class JsonLines:
    """File opened for each line: to rotate it, move it away.

    Without a path nothing is written.
    """

    def __init__(self, path: Path | None, setting: str, most_unwritten: int) -> None:
        """Check the file.

        Raises StartError naming the setting where it cannot be written.
        """
        self._path = path
        self._setting = setting
        self._most_unwritten = most_unwritten
        self._thread = ThreadPoolExecutor(1, setting)
        self._lock = threading.Lock()
        self._unwritten = 0
        if path is not None:
            try:
                _open_private(path).close()
            except OSError as error:
                raise StartError(setting, f"cannot write {path}: {error.strerror}") from None

    def write(self, line: Callable[[], dict[str, Any]]) -> bool:
        """Queue a line; `line` is called on the thread.

        Returns False when the line is dropped.
        """
        with self._lock:
            if self._unwritten >= self._most_unwritten:
                return False
            self._unwritten += 1
        self._thread.submit(self._append, line)
        return True

    async def close(self) -> None:
        """Close the writer when all is written."""
        await asyncio.to_thread(self._thread.shutdown)

    def _append(self, line: Callable[[], dict[str, Any]]) -> None:
        assert self._path is not None
        try:
            with _open_private(self._path) as file:
                file.write(json.dumps(line(), separators=(",", ":")) + "\n")
        except OSError as error:
            log.error("a line of %s is lost: %s: %s", self._setting, self._path, error.strerror)
        except Exception:  # otherwise the error would be lost, and the count wrong for ever
            log.exception("a line of %s is lost", self._setting)
        with self._lock:
            self._unwritten -= 1


def _open_private(path: Path) -> TextIO:
    """Open a file to append to it, readable by its owner only: lines may hold prompts.

    Raises OSError.
    """
    return open(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600))
