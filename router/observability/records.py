"""Records of requests: what a router keeps of each, once; read by `tandem explain`, console, record file and traces.

Bounded in memory. A record has neither the prompt nor the output.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.errors import InvalidRequest, ServiceError
from protos import inference_pb2 as pb
from router.models.model_selection import Verdict
from router.placement.place import Decision
from router.placement.snapshots import PlacementSnapshot
from router.prepared_request import PreparedRequest

MEMORY_BYTES = 16 << 20
"""Approximate memory for records. A placement's inputs take 4 KiB with few workers, up to 300 KiB with 128."""
RECORD_BYTES = 4096
"""Approximate bytes of a record without the inputs of its placements."""
MOST_PLACEMENTS = 16
"""Placements kept per request; refusals for lack of capacity have no other bound."""
MOST_ENDED = 256
"""Requests that ended well and that the console may ask for."""
MOST_WITH_THUMBNAILS = 40
"""Requests whose thumbnails are kept: as many as the console shows."""


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
class RequestRecord:
    """Record of one request; times are seconds since 1970 unless they are durations."""

    request_id: str
    tenant: str
    arrived_at: float
    asked_model: str = ""
    """Model that the request named."""
    is_chat: bool = False
    session_id: str = ""
    model: str = ""
    """Model that serves it; empty until the request is checked."""
    model_reason: str = ""
    verdicts: tuple[Verdict, ...] = ()
    num_prompt_tokens: int = 0
    placements: deque[Placement] = field(default_factory=lambda: deque(maxlen=MOST_PLACEMENTS))
    ttft_s: float = 0.0
    """Seconds from its arrival to the first message; 0 before it."""
    ended: bool = False
    ended_at: float = 0.0
    num_output_tokens: int = 0
    """Output tokens of all choices."""
    reasons: Sequence[pb.FinishReason.ValueType] = ()
    """Finish reason of each choice, by index."""
    finish: pb.Finish | None = None
    """Last message of a request that ended well, with receipt and usage."""
    refusal: Refused | None = None
    """Error that its client got, where it did not end well."""
    thumbnails: Sequence[str] = ()
    """Thumbnails of the prompt's pictures as data: URLs, where they are kept."""
    number: int = -1
    """Number among the requests that ended well, from 0 on."""
    num_bytes: int = RECORD_BYTES
    forgotten: bool = False

    def checked(self, prepared: PreparedRequest) -> None:
        """Record what is known once the request is checked."""
        request = prepared.request
        self.request_id, self.tenant, self.session_id = prepared.request_id, request.tenant, request.session_id
        self.model, self.model_reason, self.verdicts = prepared.model.name, prepared.model_reason, prepared.verdicts
        self.num_prompt_tokens = len(prepared.prompt)
        self.arrived_at = time.time() - (time.monotonic() - prepared.arrived_at)

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


class RequestRecords:
    """Records of recent requests, as many as `max_bytes` hold, running ones included."""

    def __init__(self, max_bytes: int = MEMORY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._records: deque[RequestRecord] = deque()
        self._ended: deque[RequestRecord] = deque(maxlen=MOST_ENDED)
        self._num_ended = 0
        self._latest: PlacementSnapshot | None = None
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        """Add a request that arrived, or was refused before its model was known."""
        self._records.append(record)
        self.num_bytes += record.num_bytes
        self._shrink()

    def placed(self, record: RequestRecord, placement: Placement) -> None:
        """Record a placement.

        Inputs are not kept for a record that is already forgotten.
        """
        record.placements.append(placement)
        if record.forgotten:
            placement.placement_snapshot = None
        if placement.placement_snapshot is not None:
            num_bytes = placement.placement_snapshot.num_bytes(self._latest)
            self._latest = placement.placement_snapshot
            record.num_bytes += num_bytes
            self.num_bytes += num_bytes
            self._shrink()

    def ended(self, record: RequestRecord) -> None:
        """Give a request that ended its number, for the console, if it has a receipt."""
        if record.finish is None or not record.finish.HasField("receipt"):
            return
        record.number = self._num_ended
        self._num_ended += 1
        self._ended.append(record)
        if len(self._ended) > MOST_WITH_THUMBNAILS:
            self._ended[-1 - MOST_WITH_THUMBNAILS].thumbnails = ()

    def since(self, number: int) -> list[RequestRecord]:
        """Return the requests that ended well, from `number` on."""
        return [record for record in self._ended if record.number >= number]

    def find(self, request_id: str, tenant: str | None) -> RequestRecord | None:
        """Return the last request of that id, of `tenant` unless None."""
        for record in reversed(self._records):
            if record.request_id == request_id and tenant in (None, record.tenant):
                return record
        return None

    def _shrink(self) -> None:
        while self.num_bytes > self._max_bytes and self._records:
            forgotten = self._records.popleft()
            self.num_bytes -= forgotten.num_bytes
            forgotten.forgotten = True
            for placement in forgotten.placements:
                placement.placement_snapshot = None
