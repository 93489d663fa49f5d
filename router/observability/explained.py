"""Records of requests as answers of the APIs: `tandem explain`, and the console."""

from typing import Any

from google.protobuf.json_format import MessageToDict

from protos import inference_pb2 as pb
from router.models.model_selection import Verdict
from router.observability.records import Placement, RequestRecord
from router.placement.demand import Alternative, Candidate
from router.placement.place import Decision
from router.security.api_keys import Principal

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


def to_response(record: RequestRecord, num_candidates: int = MAX_EXPLAINED) -> pb.DecisionsResponse:
    """Convert a record; tenths of a second per placement for a large fleet, so not on an event loop."""
    return pb.DecisionsResponse(
        request_id=record.request_id,
        tenant=record.tenant,
        arrived_at=record.arrived_at,
        model=record.model,
        model_reason=record.model_reason,
        models=map(compared, record.verdicts),
        placements=[decided(placement, num_candidates) for placement in tuple(record.placements)],
        ended=record.ended,
        error="" if record.refusal is None else record.refusal.text,
    )


def to_console(record: RequestRecord) -> dict[str, Any]:
    """Convert the record of a request that ended well to JSON values."""
    finish = record.finish
    assert finish is not None
    return {
        "number": record.number,
        "at": record.ended_at,
        "ttft_ms": record.ttft_s * 1e3,
        "total_ms": (record.ended_at - record.arrived_at) * 1e3,
        "prompt_tokens": finish.usage.prompt_tokens,
        "completion_tokens": record.num_output_tokens,
        "cached_tokens": finish.usage.cached_tokens,
        "receipt": MessageToDict(finish.receipt, preserving_proto_field_name=True),
        "thumbnails": list(record.thumbnails),
        "ways": _ways(record.placements[-1].decision) if record.placements else [],
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
