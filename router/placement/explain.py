"""All candidates of a decision, term by term: for display, and for tests of placement.

Pure.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from router.placement.candidates import Candidate, Route, assess, best_source
from router.placement.demand import Demand
from router.placement.place import startable
from router.placement.rates import Bools, Ints, Rates
from router.placement.worker_table import Hits, WorkerTable


def explain(
    demand: Demand, workers: WorkerTable, hits: Hits, rates: Rates, available: Ints | None = None
) -> list[Candidate]:
    """Return all candidates to start the request now, the choice of `place` first; empty where it returns None.

    Computed one at a time: milliseconds for a small fleet, tenths of a second for a hundred workers.
    """
    if not workers.ids:
        return []
    sources = [best_source(demand, workers, hits, rates, lender) for lender in range(len(workers.ids))]
    computing = workers.computing_lenders(demand)
    candidates = [
        assess(demand, workers, hits, rates, way)
        for decode in np.flatnonzero(startable(demand, workers, available))
        for way in _ways(demand, workers, hits, computing, sources, int(decode))
    ]
    return sorted(candidates, key=lambda candidate: candidate.order)


def _ways(
    demand: Demand, workers: WorkerTable, hits: Hits, computing: Bools, sources: Sequence[int | None], decode: int
) -> Iterator[Route]:
    """Yield the routes of a decode worker.

    `computing`: lenders that may compute. `sources`: the source of each worker as a computing lender.
    """
    usable = demand.num_usable_blocks
    own = min(int(hits.held[decode]), usable)
    yield Route(decode)
    if own == usable:
        return
    for lender in range(len(workers.ids)):
        if not workers.compatible[decode, lender]:
            continue
        if min(int(hits.held[lender]), usable) > own:
            yield Route(decode, lender)
        if computing[lender]:
            yield Route(decode, lender, computes=True, source=sources[lender])
