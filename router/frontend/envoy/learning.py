"""Answers that a gateway shows, as the end of a stream from which placement learns.

Pure. A server's answer has no receipt, so what placement predicted stands where the server tells nothing.
"""

import re
from dataclasses import dataclass

from protos import inference_pb2 as pb
from router.placement.fleet.worker_records import ActivePlacement
from router.placement.place import Decision

TAIL_BYTES = 4096
"""Bytes of an answer's end, which has its usage and how it ended."""
_COMPLETION = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)')
_CUT = re.compile(rb'"(?:finish|stop)_reason"\s*:\s*"(?:length|max_tokens)"')


@dataclass(slots=True)
class SeenAnswer:
    """Parts of an answer that matter for placement."""

    streams: bool = False
    """Whether it is a stream of events, so that its first bytes are the first token."""
    num_events: int = 0
    tail: bytes = b""

    def add(self, body: bytes) -> None:
        self.num_events += body.count(b"data:")
        self.tail = (self.tail + body)[-TAIL_BYTES:]

    @property
    def num_tokens(self) -> int:
        """Output tokens by the server's usage, or about as many as it sent events; 0: unknown."""
        if told := _COMPLETION.findall(self.tail):
            return int(told[-1])
        return max(1, self.num_events - 1) if self.streams else 0


def finish_of(
    request_id: str, placed: ActivePlacement, decision: Decision, answer: SeenAnswer, first_s: float, rest_s: float
) -> pb.Finish:
    """Return the end of a stream whose first bytes came `first_s` after its placement, and its last `rest_s` later."""
    demand, decode_id = placed.demand, decision.decode_id
    hits = min(demand.num_usable_blocks, decision.hit_blocks)
    if placed.lender is None and (cached := _CACHED.findall(answer.tail)):
        hits = min(demand.num_usable_blocks, int(cached[-1]) // demand.block_tokens)
    kv = pb.KvReceipt(block_tokens=demand.block_tokens, predicted=not _CACHED.search(answer.tail))
    stages = []
    if placed.lender is None:
        kv.reused_blocks, kv.computed_blocks = hits, demand.num_usable_blocks - hits
        kv.computed_tokens = demand.num_tokens - hits * demand.block_tokens
        stages.append(pb.Stage(name="prompt tail", where=decode_id, duration_ms=first_s * 1e3))
    stages.append(pb.Stage(name="decode", where=decode_id, start_ms=first_s * 1e3, duration_ms=rest_s * 1e3))
    placement = pb.Placement(
        decode_worker=decode_id,
        lender=decision.lender_id or "",
        reason=decision.reason,
        candidates=decision.num_candidates,
        predicted_ttft_ms=decision.predicted_ttft_s * 1e3,
        predicted_hit_blocks=decision.hit_blocks,
        attempt=1,
    )
    return pb.Finish(
        reason=pb.FINISH_REASON_LENGTH if _CUT.search(answer.tail) else pb.FINISH_REASON_STOP,
        usage=pb.Usage(
            prompt_tokens=demand.num_tokens,
            completion_tokens=answer.num_tokens,
            cached_tokens=hits * demand.block_tokens,
        ),
        receipt=pb.Receipt(request_id=request_id, placement=placement, kv=kv, stages=stages if answer.streams else []),
    )
