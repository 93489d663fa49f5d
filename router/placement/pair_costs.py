"""Costs of all candidates of a placement at once, as matrices over decode workers and lenders.

Pure. `candidates.py` computes the same for one candidate, in the same order of operations, so both give equal floating
point numbers and equal ties. In a large fleet a lower bound, one term per decode worker and one per lender, first
excludes the pairs that can be neither chosen nor among the alternatives.

Shapes: W workers of the model, D decode workers that may serve the request (`rows`), L lenders of one kind, R <= D
decode workers whose costs are computed. Vectors of all workers are [W], matrices of rates between two workers [W, W].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from router.placement.affinity import MOST_S, PART, SHARE
from router.placement.candidates import Route
from router.placement.demand import Demand
from router.placement.rates import Floats, Ints, Rates
from router.placement.worker_table import Hits, WorkerTable

FEW = 5
"""Number of cheapest alternatives that a decision keeps."""
MANY_PAIRS = 20_000
"""Pairs of a decode worker and a lender from which the bound costs less than it saves."""
SAMPLE = 8
"""Decode workers, and lenders, of the pairs whose costs are computed first, so that the others' bound has a limit."""
ROUNDING = 1 + 1e-9
"""Factor above the rounding of a bound, whose terms are added in another order than a cost's."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A candidate that was not chosen."""

    decode_id: str
    lender_id: str | None
    lender_computes: bool
    cost_s: float


class Costs:
    """All candidates: D decode workers, those of `rows`, times L lenders, [D, L]."""

    def __init__(self, demand: Demand, workers: WorkerTable, hits: Hits, rates: Rates, rows: Ints) -> None:
        self._demand, self._workers, self._rates, self._rows = demand, workers, rates, rows
        # [W]: blocks of this prompt that a worker has, and that it has or will have once its queue is computed.
        self._held = np.minimum(hits.held, demand.num_usable_blocks)
        self._due = np.minimum(hits.due, demand.num_usable_blocks)
        self._own = self._held[rows]  # [D], as all that follows
        self._last_decode = hits.last_decode
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
        self._prefer(alone_s, self._rows)
        at = int(alone_s.argmin())
        options = [(float(alone_s[at]), at, -1, False, -1)]
        near = [(float(alone_s[few]), int(few), -1, False) for few in _few(alone_s, FEW + 1)]
        num_candidates = len(self._rows)
        for make in (self._reading, self._computing):
            pairs = make(_limit_s([cost_s for cost_s, *_ in near]))
            if pairs is None:
                continue
            num_candidates += pairs.num_possible
            if pairs.cost_s.size:
                best, few = pairs.cheapest()
                near += map(pairs.at, few)
                options.append((*pairs.at(best), pairs.source_at(best)))
        _, decode, lender, computes, source = chosen = min(options)
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

    def _reading(self, limit_s: float) -> "_Pairs | None":
        """Return the pairs of which the first reads what the second holds; those beyond `limit_s` may be missing."""
        held, own = self._held, self._own
        lenders = np.flatnonzero(held > own.min())
        if not len(lenders):
            return None
        if len(self._rows) * len(lenders) < MANY_PAIRS:
            cost_s = self._reading_s(slice(None), lenders)
            return _Pairs(cost_s, np.arange(len(self._rows)), lenders, int(np.count_nonzero(np.isfinite(cost_s))))
        num_possible = np.count_nonzero(self._workers.compatible[self._rows] & (held > own[:, None]))
        # A pair costs queue + fixed + crowding + loan overhead + bytes / rate + (1 + decoding) * tokens / tokens_per_s,
        # where `tokens` [L] are those left to compute after reading from a lender. For the bound the bytes cost
        # nothing, the overhead is the smallest, and every lender leaves `least` tokens or more: this needs no lender.
        tokens = self._demand.num_tokens - held[lenders] * self._demand.block_tokens
        least = tokens.min()
        delayed = 1 + self._decoding
        of_row = self._queue_s + self._fixed_s + self._crowding_s + delayed * (least / self._tokens_per_s)
        of_row += self._rates.loan_overhead_s.min()
        self._allow_preference(of_row, self._rows, self._last_decode)
        # What a lender leaves beyond `least` costs at least as much as on the decode worker that computes it fastest.
        of_lender = (tokens - least) * (delayed / self._tokens_per_s).min()
        of_row[own >= held.max()] = np.inf  # nobody has more than these hold themselves
        near = self._near(limit_s, of_row, of_lender, lambda at, some: self._reading_s(at, lenders[some]))
        rows, lenders = near[0], lenders[near[1]]
        return _Pairs(self._reading_s(rows, lenders), rows, lenders, int(num_possible))

    def _reading_s(self, at: Ints | slice, lenders: Ints) -> Floats:
        """Return costs [R, L] of the decode workers at these positions, infinite where impossible."""
        rows, rates, demand = self._rows[at], self._rates, self._demand
        held = self._held[lenders]
        gain = held - self._own[at][:, None]
        cost_s = gain * demand.block_bytes
        cost_s += self._shared_bytes(cost_s, rows, lenders)
        cost_s /= _pick(rates.kv_bytes_per_s, rows, lenders)
        cost_s += _pick(rates.loan_overhead_s, rows, lenders)
        cost_s += self._queue_s[at][:, None]
        own_s = (demand.num_tokens - held * demand.block_tokens) / self._tokens_per_s[at][:, None]
        cost_s += self._fixed_s[at][:, None] + own_s
        own_s *= self._decoding[at][:, None]
        own_s += self._crowding_s[at][:, None]
        cost_s += own_s
        self._prefer(cost_s, rows)
        cost_s[(gain <= 0) | ~_pick(self._workers.compatible, rows, lenders)] = np.inf
        return cost_s

    def _computing(self, limit_s: float) -> "_Pairs | None":
        """Return the pairs of which the second computes what it lacks; those beyond `limit_s` may be missing."""
        demand, workers, rates = self._demand, self._workers, self._rates
        usable = demand.num_usable_blocks
        lenders = np.flatnonzero(workers.computing_lenders(demand))
        if not len(lenders) or self._own.min() == usable:
            return None
        if len(self._rows) * len(lenders) < MANY_PAIRS:
            cost_s, sources = self._computing_s(slice(None), lenders)
            num_possible = np.count_nonzero(np.isfinite(cost_s))
            return _Pairs(cost_s, np.arange(len(self._rows)), lenders, int(num_possible), sources)
        # A pair costs the lender's reading, queue and computing, then the loan, then the decode worker's own part. The
        # last two depend on the decode worker at the best rate and the smallest overhead of any pair: `of_row` [D].
        lacks = usable - self._own
        computes = np.zeros(len(workers.ids), np.bool_)
        computes[lenders] = True
        num_possible = np.count_nonzero(workers.compatible[self._rows[lacks > 0]] & computes)
        own_s = self._own_s(np.full(len(self._rows), float(usable)))
        of_row = lacks * demand.block_bytes / rates.kv_bytes_per_s.max() + rates.loan_overhead_s.min()
        of_row += self._cost_alone_s(0.0, own_s, self._queue_s)
        self._allow_preference(of_row, self._rows, self._last_decode)
        # A lender computes what is left after the best source, of which none holds more than the fullest worker; the
        # reading itself is free in the bound: `of_lender` [L].
        tokens = workers.queued_prefill_tokens[lenders]
        tokens = tokens + (usable - np.maximum(self._due[lenders], self._held.max())) * demand.block_tokens
        of_lender = rates.prefill_fixed_s[lenders] + tokens / rates.prefill_tokens_per_s[lenders]
        self._allow_preference(of_lender, lenders, self._last_lender)
        near = self._near(limit_s, of_row, of_lender, lambda at, some: self._computing_s(at, lenders[some])[0])
        rows, lenders = near[0], lenders[near[1]]
        cost_s, sources = self._computing_s(rows, lenders)
        return _Pairs(cost_s, rows, lenders, int(num_possible), sources)

    def _computing_s(self, at: Ints | slice, lenders: Ints) -> tuple[Floats, Ints]:
        """Return costs [R, L] of the decode workers at these positions, and the lenders' sources.

        Costs are infinite where impossible; -1 means no source.
        """
        demand, workers, rates, rows = self._demand, self._workers, self._rates, self._rows[at]
        usable = demand.num_usable_blocks
        sources, have, read_s = self._sources(lenders)
        tokens_per_s = rates.prefill_tokens_per_s[lenders]
        queue_s = workers.queued_prefill_tokens[lenders] / tokens_per_s
        compute_s = rates.prefill_fixed_s[lenders] + (usable - have) * demand.block_tokens / tokens_per_s
        ready_s = read_s + queue_s + compute_s
        lacks = usable - self._own[at]
        num_bytes, bytes_per_s = (lacks * demand.block_bytes)[:, None], _pick(rates.kv_bytes_per_s, rows, lenders)
        left = self._left_bytes(num_bytes, bytes_per_s, ready_s, rows, lenders)
        cost_s = (num_bytes + left) / bytes_per_s
        cost_s += _pick(rates.loan_overhead_s, rows, lenders)
        cost_s += ready_s
        own_s = (demand.num_tokens - float(usable) * demand.block_tokens) / self._tokens_per_s[at]
        cost_s += self._queue_s[at][:, None]
        cost_s += (self._fixed_s[at] + own_s)[:, None]
        cost_s += (self._decoding[at] * own_s + self._crowding_s[at])[:, None]
        self._prefer(cost_s, rows, lenders)
        cost_s[(lacks <= 0)[:, None] | ~_pick(workers.compatible, rows, lenders)] = np.inf
        return cost_s, sources

    def _near(
        self, limit_s: float, of_row: Floats, of_lender: Floats, cost_s: Callable[[Ints, Ints], Floats]
    ) -> tuple[Ints, Ints]:
        """Return the decode workers and the lenders, by position, of all pairs that can matter.

        `of_row` [D] and `of_lender` [L] together are at most the pair's cost, which `cost_s` computes for some. A pair
        beyond `limit_s`, or dearer than FEW + 1 others, does not matter.
        """
        # True costs of a few promising pairs give a limit that FEW + 1 pairs keep to. A decode worker whose bound with
        # the best lender is above the limit is in no pair that matters; nor is a lender with the best decode worker.
        some = np.sort(_few(of_row, SAMPLE)), np.sort(_few(of_lender, SAMPLE))
        limit_s = min(limit_s, _limit_s(cost_s(*some).reshape(-1))) * ROUNDING
        rows = np.flatnonzero(of_row + of_lender.min() <= limit_s)
        return rows, np.flatnonzero(of_lender + of_row.min() <= limit_s)

    def _allow_preference(self, bound_s: Floats, rows: Ints, last: int) -> None:
        """Lower a bound by the most that the session's last worker can save; `last`: its row."""
        if (at := _position(rows, last)) >= 0:
            bound_s[at] -= MOST_S

    def _prefer(self, cost_s: Floats, rows: Ints, computing: Ints | None = None) -> None:
        """Reduce costs, [R] or [R, L], of the workers of the session's last request; `computing`: rows of the L.

        Where both match, two reductions are subtracted at once, as `Candidate.affinity_s` does.
        """
        row = _position(rows, self._last_decode)
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
        # Flows share a NIC equally: of each other flow at most as many bytes pass before ours ends as ours has, and at
        # most all that are left of it. The fuller of the two NICs decides.
        workers = self._workers
        waiting: Floats = num_bytes * workers.outgoing_flows.take(lenders)
        np.minimum(waiting, workers.outgoing_bytes.take(lenders), out=waiting)
        incoming = num_bytes * workers.incoming_flows.take(borrowers)[:, None]
        np.minimum(incoming, workers.incoming_bytes.take(borrowers)[:, None], out=incoming)
        return np.maximum(waiting, incoming, out=waiting)

    def _left_bytes(
        self, num_bytes: Floats, bytes_per_s: Floats, ready_s: Floats, rows: Ints, lenders: Ints
    ) -> Floats | float:
        """Return the bytes in flight, [R, L], for which loans still wait once their lenders have the blocks."""
        # While the lender computes, what is in flight now drains at the pair's rate.
        if not len(lenders) or self._most_in_flight <= ready_s.min() * bytes_per_s.min():
            return 0.0  # the common case, found without a matrix
        waiting: Floats = np.maximum(0.0, self._shared_bytes(num_bytes, rows, lenders) - ready_s * bytes_per_s)
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
        # [L, H]: time of reading from a holder, less the time in which the lender would compute the same blocks.
        lost_s = read_s - gain * demand.block_tokens / rates.prefill_tokens_per_s[lenders][:, None]
        lost_s[(gain <= 0) | ~_pick(self._workers.compatible, lenders, holders)] = np.inf
        best = lost_s.argmin(axis=1)
        each = np.arange(len(at))
        worth = np.flatnonzero(lost_s[each, best] < 0)
        at, best = at[worth], best[worth]
        sources[at], seconds[at] = holders[best], read_s[worth, best]
        have[at] += gain[worth, best]
        return sources, have, seconds


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Pairs of a decode worker and a lender that can matter, and their costs."""

    cost_s: Floats
    """Costs [R, L], infinite where impossible."""
    positions: Ints
    """Positions of the R decode workers among all D."""
    lenders: Ints
    """Rows of the L lenders."""
    num_possible: int
    """Number of possible pairs, those that cannot matter among them."""
    sources: Ints | None = None
    """Rows of the sources [L] of lenders that compute, -1 for none; None where the lenders do not compute."""

    def cheapest(self) -> tuple[int, list[int]]:
        """Return the flat index of the cheapest pair, and of FEW + 1 of which no other is cheaper.

        These are in the FEW + 1 rows with the smallest minima. To look there is faster than to partition all pairs.
        """
        least_s = self.cost_s.min(axis=1)
        row, rows = int(least_s.argmin()), _few(least_s, FEW + 1)
        width = self.cost_s.shape[1]
        few = [divmod(int(flat), width) for flat in _few(self.cost_s[rows].reshape(-1), FEW + 1)]
        best = row * width + int(self.cost_s[row].argmin())
        return best, [int(rows[at]) * width + column for at, column in few]

    def at(self, flat: int) -> tuple[float, int, int, bool]:
        """Return a pair's cost, position of the decode worker, row of the lender, and whether that computes."""
        row, lender = divmod(flat, len(self.lenders))
        computes = self.sources is not None
        return float(self.cost_s[row, lender]), int(self.positions[row]), int(self.lenders[lender]), computes

    def source_at(self, flat: int) -> int:
        """Return the row of a pair's source, or -1."""
        return -1 if self.sources is None else int(self.sources[flat % len(self.lenders)])


def _few(cost_s: Floats, count: int) -> Ints:
    """Return the indices of the `count` smallest costs, unordered."""
    if len(cost_s) <= count:
        return np.arange(len(cost_s))
    return np.argpartition(cost_s, count - 1)[:count]


def _limit_s(costs_s: Sequence[float] | Floats) -> float:
    """Return the smallest cost that FEW others do not exceed; infinity where there are not as many."""
    return float(np.partition(costs_s, FEW)[FEW]) if len(costs_s) > FEW else np.inf


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
