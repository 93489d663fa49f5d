"""Claims: which of several processes runs a batch.

A claim saves work; that every line is answered once does not depend on it.
"""

import asyncio
import fcntl
import logging
import os
from abc import ABC, abstractmethod

from batches.storage.disk import FILE_MODE
from batches.storage.file_store import BatchFolder

log = logging.getLogger(__name__)


class Claim(ABC):
    """Claim of a batch by this process."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        """Set when another process may have the batch."""

    @abstractmethod
    async def release(self) -> None:
        """Let others claim the batch."""


class Claims(ABC):
    """Interface of claims."""

    @abstractmethod
    async def claim(self, batch: BatchFolder) -> Claim | None:
        """Return a claim, or None while another process has the batch.

        Raises OSError, TandemError.
        """

    async def close(self) -> None:  # noqa: B027 # some have nothing to close
        """Release what all claims share."""


class LockClaims(Claims):
    """Claims by locks of the kernel, which end with the process; for routers of one host."""

    async def claim(self, batch: BatchFolder) -> Claim | None:
        fd = await asyncio.to_thread(_lock, batch)
        return None if fd is None else _Lock(fd)


class _Lock(Claim):
    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    async def release(self) -> None:
        os.close(self._fd)


def _lock(batch: BatchFolder) -> int | None:
    fd = os.open(batch.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd
