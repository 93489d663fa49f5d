"""One candidate for a request, with its predicted cost, term by term.

Pure.

This is the cost model for one candidate. `pair_costs.py` computes the same for all candidates at once and `explain.py`
lists them; tests hold all three to equal figures, so the order of each sum below matters.
"""

from dataclasses import dataclass

from router.placement.affinity import reduction_s
from router.placement.demand import Demand
from router.placement.rates import Rates
from router.placement.worker_table import Hits, WorkerTable


@dataclass(frozen=True, slots=True)
class Route:
    """Route by rows of the worker table: decode worker, lender, whether the lender computes, and its source."""

    decode: int
    lender: int | None = None
    computes: bool = False
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A route with worker names, and its terms in seconds."""

    decode_id: str
    lender_id: str | None
    lender_computes: bool
    source_id: str | None
    num_blocks: int
    """Leading blocks of the prompt that the decode worker has after the loan, its own included."""
    lender_tokens: int
    """Tokens that the lender computes."""
    own_tokens: int
    """Tokens that the decode worker computes."""
    source_read_s: float
    """Seconds for the lender to read missing blocks from its source."""
    lender_queue_s: float
    lender_compute_s: float
    transfer_s: float
    """Seconds for the decode worker to read missing blocks."""
    moved_bytes: int
    """Bytes that the decode worker reads."""
    held_bytes: int
    """Bytes among those that need no computing, so they move at once."""
    source_bytes: int
    """Bytes that the lender reads from its source."""
    waiting_bytes: float
    """Bytes in flight of other placements that share a NIC with the transfer while it lasts, and delay it."""
    source_waiting_bytes: float
    """Bytes in flight that delay the lender's read from its source."""
    decode_queue_s: float
    tail_s: float
    """Seconds for the decode worker to compute the rest of the prompt."""
    hit_blocks: int
    """Blocks of the prompt that one of the three workers holds, so none computes them."""
    delay_s: float
    """Delay of all streams that run on the decode worker, summed."""
    reserved_output_tokens: int
    """Output tokens of each choice that the decode worker reserves blocks for."""
    reservation: str
    """Origin of that number, for display."""
    is_last_decode: bool = False
    """Whether its decode worker served the session's last request."""
    is_last_lender: bool = False
    """Whether its lender, which computes, did so for the session's last request."""

    @property
    def ttft_s(self) -> float:
        loan_s = self.source_read_s + self.lender_queue_s + self.lender_compute_s + self.transfer_s
        return loan_s + self.decode_queue_s + self.tail_s

    @property
    def affinity_s(self) -> float:
        """Reduction of the cost for workers that served the session's last request."""
        return (self.is_last_decode + self.is_last_lender) * reduction_s(self.ttft_s + self.delay_s)

    @property
    def cost_s(self) -> float:
        return self.ttft_s + self.delay_s - self.affinity_s

    @property
    def order(self) -> tuple[float, str, str, bool]:
        """Sort key; the smallest is chosen."""
        return self.cost_s, self.decode_id, self.lender_id or "", self.lender_computes


def transfer_s(rates: Rates, borrower: int, lender: int, num_bytes: float) -> float:
    """Return the seconds in which a pair moves so many bytes, those that it waits for among them."""
    return float(rates.loan_overhead_s[borrower, lender] + num_bytes / rates.kv_bytes_per_s[borrower, lender])


def shared_bytes(workers: WorkerTable, borrower: int, lender: int, num_bytes: int) -> float:
    """Return the bytes in flight for which a transfer of so many bytes waits, at the busier of its ends."""
    outgoing = min(num_bytes * workers.outgoing_flows[lender], workers.outgoing_bytes[lender])
    incoming = min(num_bytes * workers.incoming_flows[borrower], workers.incoming_bytes[borrower])
    return float(max(outgoing, incoming))


def best_source(demand: Demand, workers: WorkerTable, hits: Hits, rates: Rates, lender: int) -> int | None:
    """Return the source from which reading saves a computing lender most; None where it never does."""
    best, best_s = None, 0.0
    have = min(int(hits.due[lender]), demand.num_usable_blocks)
    for source in range(len(workers.ids)):
        gain = min(int(hits.held[source]), demand.num_usable_blocks) - have
        if gain <= 0 or not workers.compatible[lender, source]:
            continue
        compute_s = gain * demand.block_tokens / float(rates.prefill_tokens_per_s[lender])
        num_bytes = gain * demand.block_bytes
        waiting = shared_bytes(workers, lender, source, num_bytes)
        lost_s = transfer_s(rates, lender, source, num_bytes + waiting) - compute_s
        if lost_s < best_s:
            best, best_s = source, lost_s
    return best


def assess(demand: Demand, workers: WorkerTable, hits: Hits, rates: Rates, way: Route) -> Candidate:
    """Return the candidate of a possible route."""
    usable, block_tokens = demand.num_usable_blocks, demand.block_tokens
    decode, lender, source = way.decode, way.lender, way.source
    own = num_blocks = hit_blocks = min(int(hits.held[decode]), usable)
    source_read_s = lender_queue_s = lender_compute_s = moved_s = 0.0
    lender_tokens = source_bytes = moved_bytes = held_bytes = 0
    source_waiting = waiting = 0.0
    if lender is not None and way.computes:
        num_blocks = usable
        have = min(int(hits.due[lender]), usable)
        if source is not None:
            gain = min(int(hits.held[source]), usable) - have
            source_bytes = gain * demand.block_bytes
            source_waiting = shared_bytes(workers, lender, source, source_bytes)
            source_read_s = transfer_s(rates, lender, source, source_bytes + source_waiting)
            have += gain
        hit_blocks = max(own, have)
        lender_tokens = (usable - have) * block_tokens
        tokens_per_s = float(rates.prefill_tokens_per_s[lender])
        lender_queue_s = int(workers.queued_prefill_tokens[lender]) / tokens_per_s
        lender_compute_s = float(rates.prefill_fixed_s[lender]) + lender_tokens / tokens_per_s
    elif lender is not None:
        num_blocks = hit_blocks = min(int(hits.held[lender]), usable)
    if lender is not None:
        moved_bytes = (num_blocks - own) * demand.block_bytes
        held_bytes = (hit_blocks - own) * demand.block_bytes
        waiting = shared_bytes(workers, decode, lender, moved_bytes)
        if way.computes:
            ready_s = source_read_s + lender_queue_s + lender_compute_s
            waiting = max(0.0, waiting - ready_s * float(rates.kv_bytes_per_s[decode, lender]))
        moved_s = transfer_s(rates, decode, lender, moved_bytes + waiting)
    own_tokens = demand.num_tokens - num_blocks * block_tokens
    tokens_per_s = float(rates.decode_prefill_tokens_per_s[decode])
    own_s = own_tokens / tokens_per_s
    reserve = workers.reserves[int(workers.reserve_of[decode])]
    return Candidate(
        decode_id=workers.ids[decode],
        lender_id=None if lender is None else workers.ids[lender],
        lender_computes=way.computes,
        source_id=None if source is None else workers.ids[source],
        num_blocks=num_blocks,
        lender_tokens=lender_tokens,
        own_tokens=own_tokens,
        source_read_s=source_read_s,
        lender_queue_s=lender_queue_s,
        lender_compute_s=lender_compute_s,
        transfer_s=moved_s,
        moved_bytes=moved_bytes,
        held_bytes=held_bytes,
        source_bytes=source_bytes,
        waiting_bytes=waiting,
        source_waiting_bytes=source_waiting,
        decode_queue_s=int(workers.queued_prefill_tokens[decode]) / tokens_per_s,
        tail_s=float(rates.tail_fixed_s[decode]) + own_s,
        hit_blocks=hit_blocks,
        delay_s=int(workers.decoding[decode]) * own_s
        + int(workers.running[decode]) * float(rates.stream_delay_s[decode]),
        reserved_output_tokens=demand.reserved_output_tokens(reserve),
        reservation=demand.reservation(reserve),
        is_last_decode=decode == hits.last_decode,
        is_last_lender=way.computes and lender == hits.last_lender,
    )
