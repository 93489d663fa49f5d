"""`place`: the placement decision, one pure function over the worker table.

Every way to start the request now gets a predicted cost in seconds: a decode worker, and how it gets the blocks it
lacks. It may compute them itself; read those that another worker holds, which that worker lends at once; or borrow all
from a prefill worker, which computes what it lacks, and may itself read a part from the source that saves most.

    TTFT     the lender's queue, its reads and computing, the transfer of what the decode worker lacks, and what
             the decode worker computes itself
    + delay  what computing on the decode worker costs each of its decoding streams, and what one more stream costs all
    - a small share of both for the workers that served the session's last request (affinity.py)

The cheapest wins. `candidates.py` computes the same for one candidate; here are matrices of all, in the same order of
operations, so both give equal floating point numbers and equal ties.
"""

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from router.placement.affinity import MOST_S, PART, SHARE
from router.placement.candidates import Candidate, Route, assess
from router.placement.demand import Demand
from router.placement.rates import Bools, Floats, Ints, Rates
from router.placement.worker_table import Hits, WorkerTable

FEW = 5
"""Number of cheapest alternatives that a decision keeps."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A candidate that was not chosen."""

    decode_id: str
    lender_id: str | None
    lender_computes: bool
    cost_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen workers; without `lender_id` the decode worker computes the prompt itself."""

    decode_id: str
    lender_id: str | None
    lender_computes: bool
    """Whether the lender computes blocks it lacks; otherwise it lends what it holds."""
    source_id: str | None
    """Worker from which the lender reads blocks it lacks before it computes the rest."""
    lender_tokens: int
    """Tokens that the lender will compute."""
    own_tokens: int
    """Tokens that the decode worker will compute."""
    predicted_ttft_s: float
    cost_s: float
    num_candidates: int
    reason: str
    hit_blocks: int = 0
    """Predicted blocks of the prompt that no worker computes."""
    held_bytes: int = 0
    """Bytes that the decode worker reads and no worker computes first."""
    source_bytes: int = 0
    """Bytes that the lender reads from its source."""
    waiting_bytes: float = 0.0
    """Bytes in flight of other placements that delay both."""
    reserved_output_tokens: int = 0
    """Output tokens of each choice that the decode worker reserves blocks for."""
    reservation: str = ""
    """Origin of that number, for display."""
    alternatives: tuple[Alternative, ...] = field(default=(), compare=False)
    """The next best candidates, at most FEW."""


def startable(demand: Demand, workers: WorkerTable, available: Ints | None = None) -> Bools:
    """Return which decode workers can start the request now, [W], by `available` blocks if given.

    The worker must have the request's adapter. The traffic hash decides between canaries and other workers. A worker
    that could not hold the whole request would refuse it for good.
    """
    promised = np.array([demand.num_promised_blocks(reserve) for reserve in workers.reserves], np.int64)
    there = workers.available_blocks if available is None else available
    could: Bools = workers.starts_for(demand) & (workers.num_blocks >= demand.num_total_blocks)
    could = workers.with_adapter(could, demand.adapter)
    return workers.in_share(could & (there >= promised[workers.reserve_of]), could, demand.traffic_hash)


def place(
    demand: Demand, workers: WorkerTable, hits: Hits, rates: Rates, available: Ints | None = None
) -> Decision | None:
    """Return the cheapest candidate, or None when no decode worker can start the request now.

    `available` are the blocks it may use of each. Ties go to the first in order of worker ids.
    """
    rows = np.flatnonzero(startable(demand, workers, available))
    return place_on(rows, demand, workers, hits, rates) if len(rows) else None


def place_on(rows: Ints, demand: Demand, workers: WorkerTable, hits: Hits, rates: Rates) -> Decision:
    """Return the cheapest candidate on the decode workers of `rows`, which are not empty."""
    way, num_candidates, alternatives = _Matrices(demand, workers, hits, rates, rows).cheapest()
    best = assess(demand, workers, hits, rates, way)
    return Decision(
        decode_id=best.decode_id,
        lender_id=best.lender_id,
        lender_computes=best.lender_computes,
        source_id=best.source_id,
        lender_tokens=best.lender_tokens,
        own_tokens=best.own_tokens,
        predicted_ttft_s=best.ttft_s,
        cost_s=best.cost_s,
        hit_blocks=best.hit_blocks,
        held_bytes=best.held_bytes,
        source_bytes=best.source_bytes,
        waiting_bytes=best.waiting_bytes + best.source_waiting_bytes,
        reserved_output_tokens=best.reserved_output_tokens,
        reservation=best.reservation,
        num_candidates=num_candidates,
        reason=_reason(demand, workers, hits, way, best),
        alternatives=alternatives,
    )


class _Matrices:
    """All candidates: D decode workers, those of `rows`, times L lenders, [D, L]."""

    def __init__(self, demand: Demand, workers: WorkerTable, hits: Hits, rates: Rates, rows: Ints) -> None:
        self._demand, self._workers, self._rates, self._rows = demand, workers, rates, rows
        self._held = np.minimum(hits.held, demand.num_usable_blocks)
        self._due = np.minimum(hits.due, demand.num_usable_blocks)
        self._own = self._held[rows]
        self._last_decode = _position(rows, hits.last_decode)
        self._last_lender = hits.last_lender
        self._tokens_per_s = rates.decode_prefill_tokens_per_s[rows]
        self._queue_s = workers.queued_prefill_tokens[rows] / self._tokens_per_s
        self._fixed_s = rates.tail_fixed_s[rows]
        self._decoding = workers.decoding[rows]
        self._most_in_flight = max(workers.outgoing_bytes.max(), workers.incoming_bytes.max())
        self._crowding_s = workers.running[rows] * rates.stream_delay_s[rows]

    def cheapest(self) -> tuple[Route, int, tuple[Alternative, ...]]:
        """Return the cheapest route, the number of candidates, and the alternatives."""
        alone_s = self._cost_alone_s(0.0, self._own_s(self._own), self._queue_s)
        self._prefer(alone_s)
        at = int(alone_s.argmin())
        found = [(float(alone_s[at]), at, -1, False, -1)]
        near = [(float(alone_s[few]), int(few), -1, False) for few in _few(alone_s)]
        num_candidates = len(self._rows)
        for candidates in (self._reading(), self._computing()):
            if candidates is not None:
                cost_s, lenders, sources = candidates
                num_candidates += int(np.count_nonzero(np.isfinite(cost_s)))
                decode, lender = divmod(int(cost_s.argmin()), len(lenders))
                source = -1 if sources is None else int(sources[lender])
                best = float(cost_s[decode, lender])
                found.append((best, decode, int(lenders[lender]), sources is not None, source))
                for few in _few(cost_s.reshape(-1)):
                    decode, lender = divmod(int(few), len(lenders))
                    near.append((float(cost_s[decode, lender]), decode, int(lenders[lender]), sources is not None))
        _, decode, lender, computes, source = chosen = min(found)
        way = Route(
            int(self._rows[decode]),
            lender if lender >= 0 else None,
            computes,
            source if source >= 0 else None,
        )
        return way, num_candidates, self._alternatives(near, chosen[:4])

    def _alternatives(
        self, near: list[tuple[float, int, int, bool]], chosen: tuple[float, int, int, bool]
    ) -> tuple[Alternative, ...]:
        """Return the first alternatives by cost."""
        ids = self._workers.ids
        return tuple(
            Alternative(ids[self._rows[decode]], ids[lender] if lender >= 0 else None, computes, cost_s)
            for cost_s, decode, lender, computes in sorted(near)[: FEW + 1]
            if (cost_s, decode, lender, computes) != chosen and cost_s < np.inf
        )[:FEW]

    def _own_s(self, num_blocks: Floats) -> Floats:
        """Return the seconds of the decode workers' own computing with so many blocks each, [D]."""
        tokens = self._demand.num_tokens - num_blocks * self._demand.block_tokens
        return tokens / self._tokens_per_s

    def _cost_alone_s(self, loan_s: Floats | float, own_s: Floats, queue_s: Floats) -> Floats:
        """Return the cost without a lender, [D]; `_reading` and `_computing` add the same terms in the same order."""
        cost_s: Floats = loan_s + queue_s + (self._fixed_s + own_s) + (self._decoding * own_s + self._crowding_s)
        return cost_s

    def _reading(self) -> tuple[Floats, Ints, None] | None:
        """Return costs [D, L] of reading what L lenders hold, infinite where impossible, and their rows."""
        lenders = np.flatnonzero(self._held > self._own.min())
        if not len(lenders):
            return None
        held, rates, demand = self._held[lenders], self._rates, self._demand
        gain = held - self._own[:, None]
        cost_s = gain * demand.block_bytes
        cost_s += self._shared_bytes(cost_s, self._rows, lenders)
        cost_s /= _pick(rates.kv_bytes_per_s, self._rows, lenders)
        cost_s += _pick(rates.loan_overhead_s, self._rows, lenders)
        cost_s += self._queue_s[:, None]
        own_s = (demand.num_tokens - held * demand.block_tokens) / self._tokens_per_s[:, None]
        cost_s += self._fixed_s[:, None] + own_s
        own_s *= self._decoding[:, None]
        own_s += self._crowding_s[:, None]
        cost_s += own_s
        self._prefer(cost_s)
        cost_s[(gain <= 0) | ~_pick(self._workers.compatible, self._rows, lenders)] = np.inf
        return cost_s, lenders, None

    def _computing(self) -> tuple[Floats, Ints, Ints] | None:
        """Return costs [D, L] of borrowing all from L prefill workers, their rows, and their sources' rows.

        Costs are infinite where impossible; -1 means no source.
        """
        demand, workers, rates = self._demand, self._workers, self._rates
        usable = demand.num_usable_blocks
        lenders = np.flatnonzero(workers.computing_lenders(demand))
        if not len(lenders) or self._own.min() == usable:
            return None
        sources, have, read_s = self._sources(lenders)
        tokens_per_s = rates.prefill_tokens_per_s[lenders]
        queue_s = workers.queued_prefill_tokens[lenders] / tokens_per_s
        compute_s = rates.prefill_fixed_s[lenders] + (usable - have) * demand.block_tokens / tokens_per_s
        ready_s = read_s + queue_s + compute_s
        lacks = usable - self._own
        num_bytes, bytes_per_s = (lacks * demand.block_bytes)[:, None], _pick(rates.kv_bytes_per_s, self._rows, lenders)
        cost_s = (num_bytes + self._left_bytes(num_bytes, bytes_per_s, ready_s, lenders)) / bytes_per_s
        cost_s += _pick(rates.loan_overhead_s, self._rows, lenders)
        cost_s += ready_s
        own_s = self._own_s(np.full(len(self._rows), float(usable)))
        cost_s += self._queue_s[:, None]
        cost_s += (self._fixed_s + own_s)[:, None]
        cost_s += (self._decoding * own_s + self._crowding_s)[:, None]
        self._prefer(cost_s, lenders)
        cost_s[(lacks <= 0)[:, None] | ~_pick(workers.compatible, self._rows, lenders)] = np.inf
        return cost_s, lenders, sources

    def _prefer(self, cost_s: Floats, computing: Ints | None = None) -> None:
        """Reduce costs, [D] or [D, L], of the workers of the session's last request; `computing`: rows of the L.

        Where both match, two reductions are subtracted at once, as `Candidate.affinity_s` does.
        """
        row = self._last_decode
        column = -1 if computing is None else _position(computing, self._last_lender)
        of_row = _reduction_s(cost_s[row]) if row >= 0 else None
        if column >= 0:
            of_column = _reduction_s(cost_s[:, column])
            if of_row is not None:
                of_row[column] *= 2
                of_column[row] = 0.0
            cost_s[:, column] -= of_column
        if of_row is not None:
            cost_s[row] -= of_row

    def _shared_bytes(self, num_bytes: Floats, borrowers: Ints, lenders: Ints) -> Floats | float:
        """Return the bytes in flight for which transfers of so many bytes wait, [B, L] or 0."""
        if not self._most_in_flight:
            return 0.0
        workers = self._workers
        waiting: Floats = num_bytes * workers.outgoing_flows.take(lenders)
        np.minimum(waiting, workers.outgoing_bytes.take(lenders), out=waiting)
        incoming = num_bytes * workers.incoming_flows.take(borrowers)[:, None]
        np.minimum(incoming, workers.incoming_bytes.take(borrowers)[:, None], out=incoming)
        return np.maximum(waiting, incoming, out=waiting)

    def _left_bytes(self, num_bytes: Floats, bytes_per_s: Floats, ready_s: Floats, lenders: Ints) -> Floats | float:
        """Return the bytes in flight, [D, L], for which loans still wait once their lenders have the blocks."""
        if self._most_in_flight <= ready_s.min() * bytes_per_s.min():
            return 0.0  # the common case, found without a matrix
        waiting: Floats = np.maximum(0.0, self._shared_bytes(num_bytes, self._rows, lenders) - ready_s * bytes_per_s)
        return waiting

    def _sources(self, lenders: Ints) -> tuple[Ints, Floats, Floats]:
        """Return [L] each: row of the best source or -1, blocks of the lender after reading from it, and seconds."""
        sources, have, seconds = np.full(len(lenders), -1), self._due[lenders], np.zeros(len(lenders))
        at = np.flatnonzero(have < self._held.max())  # often few: most hold as much as anybody
        if not len(at):
            return sources, have, seconds
        demand, rates, lenders, lacking = self._demand, self._rates, lenders[at], have[at]
        holders = np.flatnonzero(self._held > lacking.min())
        gain = self._held[holders] - lacking[:, None]
        read_s = gain * demand.block_bytes
        read_s += self._shared_bytes(read_s, lenders, holders)
        read_s /= _pick(rates.kv_bytes_per_s, lenders, holders)
        read_s += _pick(rates.loan_overhead_s, lenders, holders)
        lost_s = read_s - gain * demand.block_tokens / rates.prefill_tokens_per_s[lenders][:, None]
        lost_s[(gain <= 0) | ~_pick(self._workers.compatible, lenders, holders)] = np.inf
        best = lost_s.argmin(axis=1)
        each = np.arange(len(at))
        worth = np.flatnonzero(lost_s[each, best] < 0)
        at, best = at[worth], best[worth]
        sources[at], seconds[at] = holders[best], read_s[worth, best]
        have[at] += gain[worth, best]
        return sources, have, seconds


def _few(cost_s: Floats) -> Ints:
    """Return the indices of the FEW + 1 smallest costs, unordered."""
    if len(cost_s) <= FEW + 1:
        return np.arange(len(cost_s))
    return np.argpartition(cost_s, FEW)[: FEW + 1]


def _position(rows: Ints, row: int) -> int:
    """Return the position of a row among ascending rows; -1 where it is not among them."""
    at = int(rows.searchsorted(row)) if row >= 0 else len(rows)
    return at if at < len(rows) and rows[at] == row else -1


def _reduction_s(cost_s: Floats) -> Floats:
    """Return what `affinity.reduction_s` does for each cost."""
    reduction: Floats = np.minimum(cost_s * SHARE, MOST_S) * PART
    return reduction


_Item = TypeVar("_Item", bound=np.generic)


def _pick(matrix: NDArray[_Item], rows: Ints, columns: Ints) -> NDArray[_Item]:
    """Return [rows, columns] of a [W, W] matrix."""
    return matrix.take(rows, axis=0).take(columns, axis=1)


def _reason(demand: Demand, workers: WorkerTable, hits: Hits, way: Route, best: Candidate) -> str:
    """Return the reason in words that a user can check against the receipt."""
    usable, running = demand.num_usable_blocks, int(workers.running[way.decode])
    same = "; served the last request of this session" if best.is_last_decode else ""

    def held(row: int) -> int:
        return min(int(hits.held[row]), usable)

    if usable == 0:
        return f"nothing to borrow: a short prompt, or one computed as a whole; {running} running{same}"
    holds = f"holds {held(way.decode)} of {usable} usable blocks, {running} running"
    if way.lender is None:
        kept = "nothing to borrow" if held(way.decode) >= usable else "cheaper than any loan"
        return f"{holds}; {kept}{same}"
    if not best.lender_computes:
        return f"{holds}; lender holds {best.num_blocks}, computes none{same}"
    due = min(int(hits.due[way.lender]), usable)
    queued = int(workers.queued_prefill_tokens[way.lender])
    reason = f"{holds}; lender holds {due}, {queued} tokens queued there"
    reason = reason if way.source is None else f"{reason}; reads up to {held(way.source)} from {best.source_id}"
    return reason + same
