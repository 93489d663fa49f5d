"""History of recent requests' placement decisions with all their inputs.

Pure, and bounded in memory.

No prompts and no outputs are kept.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.errors import InvalidRequest, ServiceError
from protos import inference_pb2 as pb
from router.models.model_selection import Verdict
from router.placement.place import Decision
from router.placement.snapshots.placement_snapshot import PlacementSnapshot

MOST_PLACEMENTS = 16
"""Placements kept per request; refusals for lack of capacity have no other bound."""
ENTRY_BYTES = 2048
"""Approximate bytes of a request without its placements."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An error in words: the exception itself would keep its stack, and with it the prompt."""

    code: str
    field: str
    text: str
    is_invalid: bool

    @classmethod
    def of(cls, error: ServiceError) -> "Refused":
        return cls(error.code, error.field, str(error), isinstance(error, InvalidRequest))


@dataclass(slots=True)
class Placement:
    """One decision, and its outcome."""

    attempt: int
    placed_after_s: float
    """Seconds from the request's arrival."""
    decision: Decision
    placement_snapshot: PlacementSnapshot | None
    ttft_s: float | None = None
    """Seconds from the placement."""
    hit_blocks: int | None = None
    failure: str = ""


@dataclass(slots=True, eq=False)
class Entry:
    """A request."""

    request_id: str
    tenant: str
    arrived_at: float
    """Arrival in seconds since 1970."""
    model: str = ""
    model_reason: str = ""
    verdicts: tuple[Verdict, ...] = ()
    placements: deque[Placement] = field(default_factory=lambda: deque(maxlen=MOST_PLACEMENTS))
    ended: bool = False
    refusal: Refused | None = None
    """Error that its client got, where it did not end well."""
    num_bytes: int = ENTRY_BYTES
    forgotten: bool = False

    @property
    def error(self) -> str:
        return "" if self.refusal is None else self.refusal.text

    def failed(self, failure: str) -> None:
        """Record the failure of the last placement."""
        if self.placements:
            self.placements[-1].failure = failure

    def finished(self, kv: pb.KvReceipt) -> None:
        """Record the success of the last placement."""
        if self.placements:
            self.placements[-1].hit_blocks = hit_blocks_of(kv)

    def started(self, ttft_s: float) -> None:
        """Record the first token of the last placement."""
        if self.placements:
            self.placements[-1].ttft_s = ttft_s


def hit_blocks_of(kv: pb.KvReceipt) -> int:
    """Return the prompt blocks that no worker computed."""
    return kv.reused_blocks + kv.restored_blocks + kv.store_blocks + kv.lender_cached_blocks + kv.lender_fetched_blocks


class DecisionHistory:
    """Recent requests, as many as `max_bytes` hold, running ones included."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: deque[Entry] = deque()
        self._latest: PlacementSnapshot | None = None
        self.num_bytes = 0

    @property
    def on(self) -> bool:
        return self._max_bytes > 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        """Add a request that arrived, or was refused before its model was known."""
        if self.on:
            self._entries.append(entry)
            self.num_bytes += entry.num_bytes
            self._shrink()

    def placed(self, entry: Entry, placement: Placement) -> None:
        """Record a placement.

        Inputs are not kept for an entry that is already forgotten.
        """
        entry.placements.append(placement)
        if entry.forgotten or not self.on:
            placement.placement_snapshot = None
        if placement.placement_snapshot is not None:
            num_bytes = placement.placement_snapshot.num_bytes(self._latest)
            self._latest = placement.placement_snapshot
            entry.num_bytes += num_bytes
            self.num_bytes += num_bytes
            self._shrink()

    def find(self, request_id: str, tenant: str | None) -> Entry | None:
        """Return the last request of that id, of `tenant` unless None."""
        return next((entry for entry in self._newest_first() if _is(entry, request_id, tenant)), None)

    def _newest_first(self) -> Iterator[Entry]:
        return reversed(self._entries)

    def _shrink(self) -> None:
        while self.num_bytes > self._max_bytes and self._entries:
            forgotten = self._entries.popleft()
            self.num_bytes -= forgotten.num_bytes
            forgotten.forgotten = True


def _is(entry: Entry, request_id: str, tenant: str | None) -> bool:
    return entry.request_id == request_id and tenant in (None, entry.tenant)
