"""Where a request goes: one pure function over a snapshot.

Every pair (decode worker, lender or none) that can start the request now gets a predicted cost in seconds:

    TTFT     the lender's queue and what it must compute, the transfer of what the decode worker lacks, and what the
             decode worker computes itself
    + delay  what computing on the decode worker costs each of its running streams, and what a further stream costs

and the cheapest pair wins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as placement sees it: its last report plus what was placed on it since."""

    worker_id: str
    decodes: bool
    fingerprint: bytes
    running: int
    queued_prefill_tokens: int
    available_blocks: int
    num_blocks: int
    reserve_output_tokens: int = 0
    """As in its Hello."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What placement assumes of the hardware."""

    prefill_tokens_per_s: float
    decode_prefill_tokens_per_s: float
    kv_bytes_per_s: float
    loan_overhead_s: float
    stream_delay_s: float = 0.001
    """What one more running stream on a decode worker costs; spreads streams where nothing else decides."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs."""

    num_tokens: int
    """Of the prompt, with what an earlier attempt emitted."""
    num_usable_blocks: int
    """Full blocks before the last prompt token: those that may come from elsewhere."""
    num_total_blocks: int
    """At its end, when every choice has all its max_tokens."""
    block_tokens: int
    block_bytes: int
    chain_tokens: tuple[int, ...] = ()
    """Of each choice that is to be computed: prompt and what was emitted."""
    max_chain_tokens: int = 0
    """Prompt and max_tokens."""
    shared_tokens: int = 0
    """Of the prompt, those whose full blocks the choices share."""

    def num_promised_blocks(self, reserve_output_tokens: int) -> int:
        """What a worker that promises so much output must have to start it now; 0: all of it."""
        if not reserve_output_tokens or not self.chain_tokens:
            return self.num_total_blocks
        ends = [min(self.max_chain_tokens, tokens + reserve_output_tokens) for tokens in self.chain_tokens]
        return num_blocks_of(ends, self.shared_tokens, self.block_tokens)


def num_blocks_of(ends: Sequence[int], shared_tokens: int, block_tokens: int) -> int:
    """Of chains that have so many tokens each and share the full blocks of the first `shared_tokens`."""
    shared = shared_tokens // block_tokens
    return shared + sum(-(-end // block_tokens) - shared for end in ends)


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen pair; `lender_id` None: the decode worker computes the prompt itself."""

    decode_id: str
    lender_id: str | None
    lender_tokens: int
    """What the lender will have to compute."""
    predicted_ttft_s: float
    cost_s: float
    num_candidates: int
    reason: str


def place(demand: Demand, workers: Sequence[WorkerView], hits: Mapping[str, int], rates: Rates) -> Decision | None:
    """The cheapest pair, or None when no decode worker can start the request now.

    `hits` gives the blocks of the prompt that each worker holds. Ties go to the first in order of worker id.
    """
    candidates = [
        _assess(demand, decode, lender, hits, rates)
        for decode in workers
        if decode.decodes and decode.available_blocks >= demand.num_promised_blocks(decode.reserve_output_tokens)
        for lender in [None, *(w for w in workers if not w.decodes and w.fingerprint == decode.fingerprint)]
        if lender is None or _can_lend(demand, decode, lender, hits)
    ]
    if not candidates:
        return None
    best = min(candidates, key=lambda c: (c.cost_s, c.decode.worker_id, c.lender.worker_id if c.lender else ""))
    return Decision(
        decode_id=best.decode.worker_id,
        lender_id=best.lender.worker_id if best.lender else None,
        lender_tokens=best.lender_tokens,
        predicted_ttft_s=best.ttft_s,
        cost_s=best.cost_s,
        num_candidates=len(candidates),
        reason=_reason(demand, best, hits),
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    decode: WorkerView
    lender: WorkerView | None
    lender_tokens: int
    ttft_s: float
    cost_s: float


def _can_lend(demand: Demand, decode: WorkerView, lender: WorkerView, hits: Mapping[str, int]) -> bool:
    missing = demand.num_usable_blocks > hits.get(decode.worker_id, 0)
    return missing and demand.num_usable_blocks <= lender.num_blocks


def _assess(
    demand: Demand, decode: WorkerView, lender: WorkerView | None, hits: Mapping[str, int], rates: Rates
) -> _Candidate:
    own_hits = min(hits.get(decode.worker_id, 0), demand.num_usable_blocks)
    lent_s = 0.0
    lender_tokens = 0
    own_blocks = own_hits
    if lender is not None:
        lender_hits = min(hits.get(lender.worker_id, 0), demand.num_usable_blocks)
        lender_tokens = (demand.num_usable_blocks - lender_hits) * demand.block_tokens
        moved = (demand.num_usable_blocks - own_hits) * demand.block_bytes
        lent_s = rates.loan_overhead_s + moved / rates.kv_bytes_per_s
        lent_s += (lender.queued_prefill_tokens + lender_tokens) / rates.prefill_tokens_per_s
        own_blocks = demand.num_usable_blocks
    own_tokens = demand.num_tokens - own_blocks * demand.block_tokens
    own_s = own_tokens / rates.decode_prefill_tokens_per_s
    queue_s = decode.queued_prefill_tokens / rates.decode_prefill_tokens_per_s
    ttft_s = lent_s + queue_s + own_s
    delay_s = decode.running * (own_s + rates.stream_delay_s)
    return _Candidate(decode, lender, lender_tokens, ttft_s, ttft_s + delay_s)


def _reason(demand: Demand, best: _Candidate, hits: Mapping[str, int]) -> str:
    """In words a user can check against the receipt."""
    own_hits = min(hits.get(best.decode.worker_id, 0), demand.num_usable_blocks)
    holds = f"holds {own_hits} of {demand.num_usable_blocks} usable blocks, {best.decode.running} running"
    if demand.num_usable_blocks == 0:
        return f"nothing to borrow: a short prompt, or one computed as a whole; {best.decode.running} running"
    if best.lender is None:
        kept = "nothing to borrow" if own_hits >= demand.num_usable_blocks else "cheaper than any loan"
        return f"{holds}; {kept}"
    lender_hits = min(hits.get(best.lender.worker_id, 0), demand.num_usable_blocks)
    queued = best.lender.queued_prefill_tokens
    return f"{holds}; lender holds {lender_hits}, {queued} tokens queued there"
