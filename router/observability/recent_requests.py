"""Recent requests: their placement decisions with all inputs, their receipts when they end, and both as API messages.

Bounded in memory. No prompts and no outputs are kept.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.json_format import MessageToDict

from cluster.errors import InvalidRequest, ServiceError
from protos import inference_pb2 as pb
from router.models.model_selection import Verdict
from router.placement.demand import Alternative, Candidate
from router.placement.place import Decision
from router.placement.snapshots import PlacementSnapshot
from router.security.api_keys import Principal

MOST = 256
MOST_WITH_THUMBNAILS = 40
"""Requests whose thumbnails are kept: as many as the console shows."""


@dataclass(slots=True)
class _Ended:
    number: int
    at: float
    finish: pb.Finish
    decision: Decision | None
    num_output_tokens: int
    total_s: float
    ttft_s: float
    thumbnails: Sequence[str]


class RecentRequests:
    """Recent requests of one router."""

    def __init__(self, most: int = MOST) -> None:
        self._ended: deque[_Ended] = deque(maxlen=most)
        self._count = 0

    def add(
        self,
        at: float,
        finish: pb.Finish,
        decision: Decision | None,
        num_output_tokens: int,
        ttft_s: float,
        total_s: float,
        thumbnails: Sequence[str] = (),
    ) -> None:
        """Add a request that ended `at` seconds since the epoch.

        `decision` is that of its last placement; `num_output_tokens` counts all choices; `thumbnails` are data: URLs.
        """
        if finish.HasField("receipt"):
            ended = _Ended(self._count, at, finish, decision, num_output_tokens, total_s, ttft_s, thumbnails)
            self._ended.append(ended)
            self._count += 1
            if len(self._ended) > MOST_WITH_THUMBNAILS:
                self._ended[-1 - MOST_WITH_THUMBNAILS].thumbnails = ()

    def since(self, number: int) -> list[dict[str, Any]]:
        """Return the requests from `number` on as JSON values; numbers grow by one."""
        return [_as_json(ended) for ended in self._ended if ended.number >= number]


def _as_json(ended: _Ended) -> dict[str, Any]:
    receipt, usage = ended.finish.receipt, ended.finish.usage
    return {
        "number": ended.number,
        "at": ended.at,
        "ttft_ms": ended.ttft_s * 1e3,
        "total_ms": ended.total_s * 1e3,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": ended.num_output_tokens,
        "cached_tokens": usage.cached_tokens,
        "receipt": MessageToDict(receipt, preserving_proto_field_name=True),
        "thumbnails": list(ended.thumbnails),
        "ways": [] if ended.decision is None else _ways(ended.decision),
    }


def _ways(decision: Decision) -> list[dict[str, Any]]:
    """Return the chosen candidate and the next best."""
    chosen = Alternative(decision.decode_id, decision.lender_id, decision.lender_computes, decision.cost_s)
    return [
        {
            "decode_worker": way.decode_id,
            "lender": way.lender_id or "",
            "lender_computes": way.lender_computes,
            "cost_ms": way.cost_s * 1e3,
        }
        for way in (chosen, *decision.alternatives)
    ]


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


MAX_EXPLAINED = 256
"""Candidates in an answer, the cheapest; a fleet of hundreds has tens of thousands."""


def compared(verdict: Verdict) -> pb.ModelCandidate:
    option = verdict.option
    return pb.ModelCandidate(
        model=option.name,
        fit=verdict.fit,
        verdict=verdict.why,
        prompt_tokens=option.num_prompt_tokens,
        counted=option.counted,
        price=option.price,
        ttft_ms=None if option.ttft_s is None else option.ttft_s * 1e3,
    )


def num_shown(principal: Principal) -> int:
    """Return how many candidates a caller may see: others than the chosen one show the load of the cluster."""
    return MAX_EXPLAINED if principal.operator else 1


def decided(placement: Placement, num_candidates: int = MAX_EXPLAINED) -> pb.PlacementDecision:
    placement_snapshot = placement.placement_snapshot
    candidates = placement_snapshot.candidates() if placement_snapshot is not None else []
    return pb.PlacementDecision(
        attempt=placement.attempt,
        placed_after_ms=placement.placed_after_s * 1e3,
        reason=placement.decision.reason,
        usable_blocks=placement_snapshot.demand.num_usable_blocks if placement_snapshot is not None else 0,
        candidates=[candidate_of(candidate) for candidate in candidates[:num_candidates]],
        num_candidates=placement.decision.num_candidates,
        ttft_ms=None if placement.ttft_s is None else placement.ttft_s * 1e3,
        hit_blocks=placement.hit_blocks,
        failure=placement.failure,
        reserved_output_tokens=placement.decision.reserved_output_tokens,
        reservation=placement.decision.reservation,
    )


WITH_FIELDS = frozenset(
    {
        *("source_read", "lender_queue", "lender_compute", "transfer", "decode_queue", "prompt_tail"),
        *("prompt_delay", "stream_delay"),
    }
)
"""Terms that have fields of PlacementCandidate, some of them together."""


def candidate_of(candidate: Candidate) -> pb.PlacementCandidate:
    ms = {name: 1e3 * seconds for name, seconds in candidate.seconds.items()}
    return pb.PlacementCandidate(
        decode_worker=candidate.decode_id,
        lender=candidate.lender_id or "",
        lender_computes=candidate.lender_computes,
        source=candidate.source_id or "",
        blocks=candidate.num_blocks,
        lender_tokens=candidate.lender_tokens,
        decode_tokens=candidate.own_tokens,
        source_read_ms=ms.get("source_read", 0.0),
        lender_queue_ms=ms.get("lender_queue", 0.0),
        lender_compute_ms=ms.get("lender_compute", 0.0),
        transfer_ms=ms.get("transfer", 0.0),
        decode_queue_ms=ms.get("decode_queue", 0.0),
        prompt_tail_ms=ms["prompt_tail"],
        ttft_ms=candidate.ttft_s * 1e3,
        delay_ms=candidate.delay_s * 1e3,
        affinity_ms=candidate.affinity_s * 1e3,
        cost_ms=candidate.cost_s * 1e3,
        hit_blocks=candidate.hit_blocks,
        transfer_bytes=candidate.moved_bytes,
        waiting_bytes=round(candidate.waiting_bytes),
        source_bytes=candidate.source_bytes,
        source_waiting_bytes=round(candidate.source_waiting_bytes),
        further_ms={name: of_term for name, of_term in ms.items() if name not in WITH_FIELDS},
    )


def to_response(entry: Entry, num_candidates: int = MAX_EXPLAINED) -> pb.DecisionsResponse:
    """Convert an entry; tenths of a second per placement for a large fleet, so not on an event loop."""
    return pb.DecisionsResponse(
        request_id=entry.request_id,
        tenant=entry.tenant,
        arrived_at=entry.arrived_at,
        model=entry.model,
        model_reason=entry.model_reason,
        models=map(compared, entry.verdicts),
        placements=[decided(placement, num_candidates) for placement in tuple(entry.placements)],
        ended=entry.ended,
        error=entry.error,
    )
