"""Choice of the decode workers on which a prompt is warmed.

Pure.
"""

from collections.abc import Sequence

import numpy as np

from kvcache.block_keys import BlockKey
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.place import place_on, startable


def by_cost(
    fleet: Fleet, demand: Demand, keys: Sequence[BlockKey], count: int, with_store: bool = False
) -> tuple[list[str], int]:
    """Return at most `count` decode workers, the cheapest first, and how many could hold the request.

    They may be full now. `with_store`: only those that share a store.
    """
    hits, workers, chosen = fleet.hits(keys, demand.other_keys, demand.session), fleet.snapshot, list[str]()
    rows = np.flatnonzero(startable(demand, workers, workers.num_blocks))
    if with_store:
        shares = {worker.worker_id for worker in fleet.workers if worker.store_id}
        rows = np.array([row for row in rows if workers.ids[row] in shares], np.int64)
    num_able = len(rows)
    while len(rows) and len(chosen) < count:
        best = place_on(rows, demand, workers, hits, fleet.rates).decode_id
        chosen.append(best)
        rows = rows[rows != workers.row_of[best]]
    return chosen, num_able
