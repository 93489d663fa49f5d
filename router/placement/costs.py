"""Costs of all candidates of a placement at once, as matrices [R, L] over decode workers and lenders.

Pure. The terms are in terms.py. In a large fleet the sum of their lower bounds, one number per decode worker and one
per lender, first excludes the pairs that can be neither chosen nor among the alternatives.
"""

import functools
import operator
from collections.abc import Sequence

import numpy as np

from router.placement.demand import Alternative, Candidate
from router.placement.pairs import KINDS, DecodeWorkers, Inputs, Kind, Pairs, position
from router.placement.rates import MOST_S, Floats, Ints, reduction_s
from router.placement.terms import Term, delay_terms, ttft_terms

FEW = 5
"""Number of cheapest alternatives that a decision keeps."""
FEW_PAIRS = 64
"""Pairs up to which sorting all of them costs less than finding the cheapest."""
ALONE = np.array([-1])
"""Lenders of pairs without."""
MANY_PAIRS = 20_000
"""Pairs of a decode worker and a lender from which the bound costs less than it saves."""
SAMPLE = 8
"""Decode workers, and lenders, of the pairs whose costs are computed first, so that the others' bound has a limit."""
ROUNDING = 1e-9
"""Share of a limit above the rounding of a bound, whose terms are added in another order than a cost's."""

Place = tuple[float, int, int, bool]
"""Cost of a candidate, row of its decode worker, row of its lender or -1, and whether that computes: the smallest is
chosen."""


class CostedPairs:
    """Pairs with their costs."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self._ttft, self._delay = ttft_terms(pairs), delay_terms()
        self._seconds: list[Floats | float] = []
        cost_s, delay_s = self._sum(self._ttft), self._sum(self._delay)
        cost_s += delay_s
        self.cost_s = cost_s
        """Costs [R, L], also of impossible pairs."""
        self._prefer()
        self.possible_s = cost_s
        """Costs [R, L], infinite where impossible."""
        self.num_possible = len(cost_s)
        if pairs.kind != "alone":
            possible = pairs.possible()
            self.possible_s = np.where(possible, cost_s, np.inf)
            self.num_possible = int(np.count_nonzero(possible))

    def _sum(self, terms: Sequence[Term]) -> Floats:
        """Return the sum of two terms or more, added from left to right, in an array of its own."""
        pairs, known = self.pairs, self.pairs.decode.seconds
        total: Floats | float | None = None
        is_own = False
        for term in terms:
            seconds = known.get(term.name)
            if seconds is None:
                seconds = term.seconds(pairs)
                if term.by_decode_worker:
                    known[term.name] = seconds
            self._seconds.append(seconds)
            if total is None:
                total = seconds
            elif is_own and isinstance(total, np.ndarray) and total.shape == pairs.shape:
                total += seconds
            else:
                total, is_own = total + seconds, True
            pairs.before_s = total
        assert isinstance(total, np.ndarray)
        return total

    def _prefer(self) -> None:
        """Reduce the costs of pairs with the workers of the session's last request."""
        hits, pairs, cost_s = self.pairs.inputs.hits, self.pairs, self.cost_s
        row = pairs.decode.last
        column = position(pairs.lenders, hits.last_lender) if pairs.kind == "computing" else -1
        of_row = reduction_s(cost_s[row]) if row >= 0 else None
        if column >= 0:
            of_column = reduction_s(cost_s[:, column])
            if of_row is not None:  # where both match, two reductions are subtracted at once
                of_row[column] *= 2
                of_column[row] = 0.0
            cost_s[:, column] -= of_column
        if of_row is not None:
            cost_s[row] -= of_row

    def nearest(self) -> list[Place]:
        """Return the cheapest pair, FEW + 1 pairs of which no other is cheaper, and perhaps more."""
        cost_s, pairs = self.possible_s, self.pairs
        rows, lenders = pairs.decode.rows, ALONE if pairs.kind == "alone" else pairs.lenders
        computes = pairs.kind == "computing"
        if cost_s.size <= FEW_PAIRS:
            columns = lenders.tolist()
            return [
                (each_s, row, lender, computes)
                for row, of_row in zip(rows.tolist(), cost_s.tolist(), strict=True)
                for each_s, lender in zip(of_row, columns, strict=True)
                if each_s < np.inf
            ]
        # The FEW + 1 are in the FEW + 1 rows with the smallest minima. To look there is faster than to partition all.
        # Among equals the first one counts, which may be in another row.
        width = len(lenders)
        least_s = cost_s.min(axis=1) if width > 1 else cost_s[:, 0]
        near, first = _few(least_s, FEW + 1).tolist(), int(least_s.argmin())
        if width > 1:
            few = _few(cost_s[near].reshape(-1), FEW + 1).tolist()
            near, first = (
                [near[at // width] * width + at % width for at in few],
                first * width + int(cost_s[first].argmin()),
            )
        return [
            (each_s, rows.item(flat // width), lenders.item(flat % width), computes)
            for flat in {first, *near}
            if (each_s := cost_s.item(flat)) < np.inf
        ]

    def candidate(self, row: int, column: int) -> Candidate:
        """Return the candidate at a position of the matrix."""
        pairs, demand, workers, hits = self.pairs, self.pairs.demand, self.pairs.workers, self.pairs.inputs.hits
        values = [_at(each, row, column) for each in self._seconds]
        num_ttft = len(self._ttft)
        # From left to right, as arrays are added; `sum` compensates rounding in Python 3.12.
        ttft_s = functools.reduce(operator.add, values[:num_ttft])
        delay_s = functools.reduce(operator.add, values[num_ttft:])
        decode = pairs.decode.rows.item(row)
        num_blocks, own = int(_at(pairs.blocks, row, column)), int(pairs.decode.own_blocks.item(row))
        lender, hit_blocks, is_last = -1, num_blocks, decode == hits.last_decode
        matches, source, lender_tokens, source_bytes, source_waiting = int(is_last), -1, 0, 0, 0.0
        moved_bytes, waiting = 0, 0.0
        if pairs.kind != "alone":
            lender = pairs.lenders.item(column)
            moved_bytes, waiting = int(_at(pairs.moved_bytes, row, column)), _at(pairs.waiting_bytes, row, column)
        if pairs.kind == "computing":
            reads = pairs.reads
            have = int(reads.blocks.item(column))
            hit_blocks, lender_tokens = max(own, have), (demand.num_usable_blocks - have) * demand.block_tokens
            source, source_bytes = int(_at(reads.sources, row, column)), int(_at(reads.num_bytes, row, column))
            source_waiting = _at(reads.waiting_bytes, row, column)
            matches += lender == hits.last_lender
        affinity_s = matches * float(reduction_s(ttft_s + delay_s)) if matches else 0.0
        reserve = workers.reserves[workers.reserve_of.item(decode)]
        return Candidate(
            decode_id=workers.ids[decode],
            lender_id=None if lender < 0 else workers.ids[lender],
            lender_computes=pairs.kind == "computing",
            source_id=None if source < 0 else workers.ids[source],
            num_blocks=num_blocks,
            hit_blocks=hit_blocks,
            lender_tokens=lender_tokens,
            own_tokens=demand.num_tokens - num_blocks * demand.block_tokens,
            moved_bytes=moved_bytes,
            held_bytes=(hit_blocks - own) * demand.block_bytes,
            source_bytes=source_bytes,
            waiting_bytes=waiting,
            source_waiting_bytes=source_waiting,
            seconds={term.name: each for term, each in zip((*self._ttft, *self._delay), values, strict=True)},
            ttft_s=ttft_s,
            delay_s=delay_s,
            affinity_s=affinity_s,
            cost_s=ttft_s + delay_s - affinity_s,
            reserved_output_tokens=demand.reserved_output_tokens(reserve),
            reservation=demand.reservation(reserve),
            is_last_decode=is_last,
        )


class Costs:
    """All candidates of one decision, on the D decode workers of `rows`, which are not empty."""

    def __init__(self, inputs: Inputs, rows: Ints) -> None:
        self._inputs = inputs
        self._decode = DecodeWorkers(inputs, rows)

    def cheapest(self) -> tuple[Candidate, int, tuple[Alternative, ...]]:
        """Return the cheapest candidate, the number of candidates, and the alternatives."""
        near, costed, num_candidates = list[Place](), dict[Kind, CostedPairs](), 0
        for kind in KINDS:
            if (pairs := self._pairs(kind)) is None:
                continue
            if kind == "alone" or pairs.shape[0] * pairs.shape[1] < MANY_PAIRS:
                costed[kind] = CostedPairs(pairs)
                num_candidates += costed[kind].num_possible
            else:
                num_candidates += int(np.count_nonzero(pairs.possible()))
                if (part := self._that_matter(pairs, near)) is None:
                    continue
                costed[kind] = CostedPairs(part)
            near += costed[kind].nearest()
        chosen, *others = sorted(near)[: FEW + 1]
        ids = self._inputs.workers.ids
        alternatives = tuple(
            Alternative(ids[decode], None if lender < 0 else ids[lender], computes, cost_s)
            for cost_s, decode, lender, computes in others
        )
        kind = "alone" if chosen[2] < 0 else "computing" if chosen[3] else "reading"
        column = 0 if kind == "alone" else position(costed[kind].pairs.lenders, chosen[2])
        best = costed[kind].candidate(position(costed[kind].pairs.decode.rows, chosen[1]), column)
        return best, num_candidates, alternatives

    def candidates(self) -> list[Candidate]:
        """Return all candidates, the cheapest first."""
        every = [CostedPairs(pairs) for kind in KINDS if (pairs := self._pairs(kind)) is not None]
        candidates = [
            costed.candidate(*at) for costed in every for at in np.argwhere(costed.possible_s < np.inf).tolist()
        ]
        return sorted(candidates, key=lambda c: (c.cost_s, c.decode_id, c.lender_id or "", c.lender_computes))

    def _pairs(self, kind: Kind) -> Pairs | None:
        """Return the pairs of a kind, impossible ones among them; None where there are none."""
        inputs, lenders = self._inputs, None
        if kind != "alone":
            own = self._decode.own_blocks
            least_own = own.item(own.argmin())
            if least_own >= inputs.demand.num_usable_blocks:
                return None
            able = inputs.held > least_own if kind == "reading" else inputs.workers.computing_lenders(inputs.demand)
            lenders = able.nonzero()[0]
            if not len(lenders):
                return None
        return Pairs(inputs, self._decode, kind, lenders)

    def _that_matter(self, pairs: Pairs, near: Sequence[Place]) -> Pairs | None:
        """Return the pairs that can be chosen or an alternative beside those of `near`; None where none can.

        A pair does not matter whose bound is above the costs of FEW + 1 others.
        """
        of_row, of_lender = np.zeros((pairs.shape[0], 1)), np.zeros(pairs.shape[1])
        for term in (*ttft_terms(pairs), *delay_terms()):
            for part_s, bound_s in zip(term.lower_bound(pairs), (of_row, of_lender), strict=True):
                if isinstance(part_s, np.ndarray) or part_s:
                    bound_s += part_s
        # The session's last workers reduce a cost by MOST_S each at most.
        rows, lenders, hits = pairs.decode.rows, pairs.lenders, self._inputs.hits
        if (at := pairs.decode.last) >= 0:
            of_row[at] -= MOST_S
        if pairs.kind == "computing" and (at := position(lenders, hits.last_lender)) >= 0:
            of_lender[at] -= MOST_S
        most = self._inputs.most_held if pairs.kind == "reading" else pairs.blocks
        of_row[pairs.decode.own_blocks >= most] = np.inf  # no lender has more than these hold themselves
        least_s = of_row.reshape(-1)

        def part(at: Ints, some: Ints) -> Pairs:
            return Pairs(self._inputs, DecodeWorkers(self._inputs, rows[at]), pairs.kind, lenders[some])

        # True costs of a few promising pairs give a limit that FEW + 1 pairs keep to. A decode worker whose bound with
        # the best lender is above the limit is in no pair that matters; nor is a lender with the best decode worker.
        sample = CostedPairs(part(np.sort(_few(least_s, SAMPLE)), np.sort(_few(of_lender, SAMPLE))))
        limit_s = min(_limit_s([place[0] for place in near]), _limit_s(sample.possible_s.reshape(-1)))
        limit_s += abs(limit_s) * ROUNDING
        at = (least_s + of_lender.min() <= limit_s).nonzero()[0]
        some = (of_lender + least_s.min() <= limit_s).nonzero()[0]
        return part(at, some) if len(at) and len(some) else None


def _few(cost_s: Floats, count: int) -> Ints:
    """Return the indices of the `count` smallest costs, unordered."""
    if len(cost_s) <= count:
        return np.arange(len(cost_s))
    return np.argpartition(cost_s, count - 1)[:count]


def _limit_s(costs_s: Sequence[float] | Floats) -> float:
    """Return the smallest cost that FEW others do not exceed; infinity where there are not as many."""
    return float(np.partition(costs_s, FEW)[FEW]) if len(costs_s) > FEW else np.inf


def _at(values: Floats | Ints | float, row: int, column: int) -> float:
    """Return one element of values [R, L], [R, 1], [L] or a number."""
    if not isinstance(values, np.ndarray):
        return float(values)
    if values.ndim == 2:
        return float(values.item(row if len(values) > 1 else 0, column if values.shape[1] > 1 else 0))
    return float(values.item(column if values.size > 1 else 0))
