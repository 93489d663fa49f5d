"""A placement term: a decode worker whose KV memory is nearly full costs more, because its streams may be preempted."""

from router.placement.pairs import Pairs
from router.placement.rates import Floats
from router.placement.terms import Term

FULL_S = 0.05
"""Seconds that a full worker costs."""


class Fullness(Term):
    name = "fullness"
    by_decode_worker = True

    def seconds(self, pairs: Pairs) -> Floats:
        """Return the cost of each decode worker, [R, 1]; it is never below 0, so its lower bound of 0 holds."""
        rows, workers = pairs.decode.column, pairs.workers
        used: Floats = 1 - workers.available_blocks[rows] / workers.num_blocks[rows]
        return FULL_S * used**4
