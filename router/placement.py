"""Where a request goes: one pure function over a snapshot.

Every way to start the request now gets a predicted cost in seconds: a decode worker, and where it gets the blocks that
it lacks. It may compute them itself; read what another worker holds of them, which that worker lends at once; or borrow
all from a prefill worker, which computes what it lacks, and may itself read a part from whoever holds more.

    TTFT     the lender's queue, what it must read and compute, the transfer of what the decode worker lacks, and what
             the decode worker computes itself
    + delay  what computing on the decode worker costs each of its running streams, and what a further stream costs

and the cheapest wins.
"""

from collections.abc import Iterator, Mapping, Sequence
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
class Hits:
    """Leading blocks of a prompt, by worker; who has none may be left out."""

    held: Mapping[str, int]
    """There now."""
    due: Mapping[str, int]
    """There when a loan that computes would come to be served."""

    @classmethod
    def just(cls, held: Mapping[str, int]) -> "Hits":
        """Nothing is being computed."""
        return cls(held, held)


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen workers; `lender_id` None: the decode worker computes the prompt itself."""

    decode_id: str
    lender_id: str | None
    lender_computes: bool
    """What it lacks; else it lends what it holds."""
    source_id: str | None
    """From whom the lender reads what it lacks, before it computes the rest."""
    lender_tokens: int
    """What the lender will have to compute."""
    predicted_ttft_s: float
    cost_s: float
    num_candidates: int
    reason: str


def place(demand: Demand, workers: Sequence[WorkerView], hits: Hits, rates: Rates) -> Decision | None:
    """The cheapest way, or None when no decode worker can start the request now.

    Ties go to the first in order of worker ids.
    """
    fullest = sorted(workers, key=lambda worker: (-hits.held.get(worker.worker_id, 0), worker.worker_id))
    candidates = [
        _assess(demand, decode, loan, rates)
        for decode in workers
        if decode.decodes and decode.available_blocks >= demand.num_promised_blocks(decode.reserve_output_tokens)
        for loan in _loans(demand, decode, fullest, hits, rates)
    ]
    if not candidates:
        return None
    best = min(candidates, key=lambda candidate: (candidate.cost_s, *candidate.names))
    lender, source = best.loan.lender, best.loan.source
    return Decision(
        decode_id=best.decode.worker_id,
        lender_id=lender.worker_id if lender else None,
        lender_computes=best.loan.computes,
        source_id=source.worker_id if source else None,
        lender_tokens=best.loan.computed_tokens,
        predicted_ttft_s=best.ttft_s,
        cost_s=best.cost_s,
        num_candidates=len(candidates),
        reason=_reason(demand, best, hits),
    )


@dataclass(frozen=True, slots=True)
class _Loan:
    """A way for a decode worker to get blocks."""

    lender: WorkerView | None = None
    computes: bool = False
    source: WorkerView | None = None
    num_blocks: int = 0
    """Leading blocks of the prompt that the decode worker has after it, its own included."""
    computed_tokens: int = 0
    seconds: float = 0.0
    """Until they are there."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    decode: WorkerView
    loan: _Loan
    ttft_s: float
    cost_s: float

    @property
    def names(self) -> tuple[str, str, bool]:
        return self.decode.worker_id, self.loan.lender.worker_id if self.loan.lender else "", self.loan.computes


def _loans(
    demand: Demand, decode: WorkerView, fullest: Sequence[WorkerView], hits: Hits, rates: Rates
) -> Iterator[_Loan]:
    """`fullest` are all workers, those that hold most first."""
    usable = demand.num_usable_blocks
    own = min(hits.held.get(decode.worker_id, 0), usable)
    yield _Loan(num_blocks=own)
    if own == usable:
        return
    for other in fullest:
        if other is decode or other.fingerprint != decode.fingerprint:
            continue
        held = min(hits.held.get(other.worker_id, 0), usable)
        if held > own:
            yield _Loan(other, num_blocks=held, seconds=_transfer_s(demand, held - own, rates))
        if not other.decodes and usable <= other.num_blocks:
            yield _computing_loan(demand, own, other, fullest, hits, rates)


def _computing_loan(
    demand: Demand, own: int, lender: WorkerView, fullest: Sequence[WorkerView], hits: Hits, rates: Rates
) -> _Loan:
    """All of the prompt from a worker that computes what neither it nor its best source has."""
    usable = demand.num_usable_blocks
    have = min(hits.due.get(lender.worker_id, 0), usable)
    prepare_s, source = 0.0, None
    holder = next((w for w in fullest if w is not lender and w.fingerprint == lender.fingerprint), None)
    if holder is not None:
        gain = min(hits.held.get(holder.worker_id, 0), usable) - have
        fetch_s = _transfer_s(demand, gain, rates)
        if gain > 0 and fetch_s < gain * demand.block_tokens / rates.prefill_tokens_per_s:
            prepare_s, source, have = fetch_s, holder, have + gain
    tokens = (usable - have) * demand.block_tokens
    compute_s = (lender.queued_prefill_tokens + tokens) / rates.prefill_tokens_per_s
    seconds = prepare_s + compute_s + _transfer_s(demand, usable - own, rates)
    return _Loan(lender, True, source, usable, tokens, seconds)


def _transfer_s(demand: Demand, num_blocks: int, rates: Rates) -> float:
    return rates.loan_overhead_s + num_blocks * demand.block_bytes / rates.kv_bytes_per_s


def _assess(demand: Demand, decode: WorkerView, loan: _Loan, rates: Rates) -> _Candidate:
    own_tokens = demand.num_tokens - loan.num_blocks * demand.block_tokens
    own_s = own_tokens / rates.decode_prefill_tokens_per_s
    queue_s = decode.queued_prefill_tokens / rates.decode_prefill_tokens_per_s
    ttft_s = loan.seconds + queue_s + own_s
    delay_s = decode.running * (own_s + rates.stream_delay_s)
    return _Candidate(decode, loan, ttft_s, ttft_s + delay_s)


def _reason(demand: Demand, best: _Candidate, hits: Hits) -> str:
    """In words a user can check against the receipt."""
    usable, loan = demand.num_usable_blocks, best.loan

    def held(worker: WorkerView) -> int:
        return min(hits.held.get(worker.worker_id, 0), usable)

    if usable == 0:
        return f"nothing to borrow: a short prompt, or one computed as a whole; {best.decode.running} running"
    holds = f"holds {held(best.decode)} of {usable} usable blocks, {best.decode.running} running"
    if loan.lender is None:
        kept = "nothing to borrow" if held(best.decode) >= usable else "cheaper than any loan"
        return f"{holds}; {kept}"
    if not loan.computes:
        return f"{holds}; lender holds {loan.num_blocks}, computes none"
    due = min(hits.due.get(loan.lender.worker_id, 0), usable)
    reason = f"{holds}; lender holds {due}, {loan.lender.queued_prefill_tokens} tokens queued there"
    return reason if loan.source is None else f"{reason}; reads up to {held(loan.source)} from {loan.source.worker_id}"
