"""Usage of tenants: the tokens of each request, and their sums by day, tenant and model.

An entry is written before the receipt is sent. So after any kill the ledger has every receipt that a client has. One
router alone keeps a file; all routers of a cluster share a Redis stream and its sums by day.
"""

import json
import logging
import os
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Literal

from cluster.config import Config
from cluster.errors import StartError

log = logging.getLogger(__name__)


class UsageSettings(Config):
    """Settings of the usage ledger."""

    usage_ledger: Literal["redis"] | Path | None = None
    """File of this router's usage ledger, to which a line per request is appended before its client has the receipt.
    redis: all routers of the cluster keep one, as a stream in `redis_url`. Unset: usage is known since the router's
    start only."""


USAGE_DAYS = 35
"""Days whose usage `GET /v1/usage` knows."""
NUMBERS = ("requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


@dataclass(frozen=True, slots=True)
class UsageEntry:
    """Usage of one request."""

    request_id: str
    at: float
    """End of the request, in seconds since the epoch."""
    tenant: str
    model: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    is_complete: bool
    """Whether the request ended with a receipt; otherwise its client left, or it failed after its first token."""

    @property
    def day(self) -> str:
        """Day in UTC, as 2026-11-25."""
        return datetime.fromtimestamp(self.at, UTC).date().isoformat()

    def to_line(self) -> bytes:
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> "UsageEntry":
        """Parse a line.

        Raises ValueError.
        """
        values = json.loads(line)
        if not isinstance(values, dict) or set(values) != {field.name for field in fields(cls)}:
            raise ValueError("the line is not an entry of a usage ledger")
        return cls(**values)


@dataclass(slots=True)
class UsageTotal:
    """Usage of one tenant of one model on one day."""

    day: str
    tenant: str
    model: str
    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.day, self.tenant, self.model


class UsageTotals:
    """Sums of entries, of the days that are kept."""

    def __init__(self, kept_days: int) -> None:
        self._kept_days = kept_days
        self._totals: dict[tuple[str, str, str], UsageTotal] = {}
        self._newest = ""

    def add(self, entry: UsageEntry) -> None:
        day = entry.day
        key = day, entry.tenant, entry.model
        total = self._totals.get(key)
        if total is None:
            total = self._totals[key] = UsageTotal(*key)
        total.requests += 1
        total.input_tokens += entry.input_tokens
        total.cached_tokens += entry.cached_tokens
        total.output_tokens += entry.output_tokens
        total.reasoning_tokens += entry.reasoning_tokens
        if day > self._newest:
            self._newest = day
            first = first_day(day, self._kept_days)
            self._totals = {key: total for key, total in self._totals.items() if key[0] >= first}

    def since(self, day: str) -> list[UsageTotal]:
        """Return the totals from a day on, in order."""
        kept = (replace(total) for total in self._totals.values() if total.day >= day)
        return sorted(kept, key=lambda total: total.key)


def first_day(last: str, num_days: int) -> str:
    """Return the first of so many days that end with `last`."""
    return date.fromordinal(max(1, date.fromisoformat(last).toordinal() - num_days + 1)).isoformat()


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
            raise StartError("usage_ledger", f"{path}: {error.strerror}") from None

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
                    raise StartError("usage_ledger", f"{path}, line {number}: {error}") from None

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
