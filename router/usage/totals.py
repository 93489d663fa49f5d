"""Entries of a usage ledger, and their sums by day, tenant and model. Pure."""

import json
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, date, datetime

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
