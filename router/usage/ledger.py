"""Usage ledgers: the tokens of each request, written before its client has the receipt.

An entry is written before the receipt is sent. So after any kill the ledger has every receipt that a client has.
"""

import logging
import os
import time
from abc import ABC, abstractmethod
from datetime import UTC, datetime
from pathlib import Path

from cluster.errors import StartError
from router.usage.totals import UsageEntry, UsageTotal, UsageTotals, first_day

log = logging.getLogger(__name__)


class UsageLedger(ABC):
    """Ledger of a router, or of all routers of a cluster."""

    @abstractmethod
    async def add(self, entry: UsageEntry) -> None:
        """Write an entry; failures are logged, and never fail the request."""

    @abstractmethod
    async def since(self, num_days: int) -> list[UsageTotal]:
        """Return the totals of the last so many days.

        Raises Unavailable.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release the file or connection."""


class MemoryLedger(UsageLedger):
    """Ledger of what happened since the router's start."""

    def __init__(self, kept_days: int) -> None:
        self._totals = UsageTotals(kept_days)

    async def add(self, entry: UsageEntry) -> None:
        self._totals.add(entry)

    async def since(self, num_days: int) -> list[UsageTotal]:
        return self._totals.since(first_day(today(), num_days))

    async def close(self) -> None:
        return


class FileLedger(MemoryLedger):
    """Ledger in a file of lines, which survives the router."""

    def __init__(self, path: Path, kept_days: int) -> None:
        """Open the file, and read what is in it.

        Raises StartError. A last line without an end is that of a request whose client has no receipt: it is cut off.
        """
        super().__init__(kept_days)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._read(path)
        except OSError as error:
            raise StartError("usage_file", f"{path}: {error.strerror}") from None

    def _read(self, path: Path) -> None:
        end = 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    os.ftruncate(self._file, end)
                    break
                end += len(line)
                try:
                    self._totals.add(UsageEntry.of_line(line))
                except (ValueError, TypeError) as error:
                    raise StartError("usage_file", f"{path}, line {number}: {error}") from None

    async def add(self, entry: UsageEntry) -> None:
        await super().add(entry)
        line = entry.to_line()
        try:
            # One short append to the page cache, which outlives this process: a thread would take longer.
            if (written := os.write(self._file, line)) != len(line):
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)  # else the next entry would join it
                raise OSError("the disk is full")
        except OSError as error:
            log.error("usage of request %s is not in the ledger: %s: %s", entry.request_id, error, line.decode())

    async def close(self) -> None:
        os.close(self._file)


def today() -> str:
    """Return the day in UTC."""
    return datetime.fromtimestamp(time.time(), UTC).date().isoformat()
