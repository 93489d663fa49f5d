"""Capacity: workers on which a class may start, without what batch must leave free and reserved workers.

Pure.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from router.admission.request import QueuedRequest
from router.placement.demand import Demand
from router.placement.place import startable
from router.placement.rates import Ints
from router.placement.worker_table import WorkerTable


@dataclass(frozen=True, slots=True, eq=False)
class Capacity:
    """Blocks of each worker that one class may use now."""

    workers: WorkerTable
    available: Ints
    """Available blocks, [W]; -1 where the class may start nothing."""
    greatest: int
    """Largest number of available blocks of any decode worker; a request with a greater `need` cannot start."""
    pool: int | None
    """Pool size of all decode workers where pools and reservations are equal; `greatest` and it then decide alone."""

    @classmethod
    def of(
        cls, workers: WorkerTable, kept_rows: Collection[int], refused: Ints, batch_block_share: float
    ) -> "Capacity":
        """Compute the capacity.

        `kept_rows` are workers reserved for others.

        `refused` [W]: the smallest number of blocks that each worker has just refused.
        """
        available = np.minimum(workers.available_blocks, refused - 1)
        if batch_block_share < 1:
            headroom = np.ceil((1 - batch_block_share) * workers.num_blocks).astype(np.int64)
            empty = available >= workers.num_blocks
            available = np.where(empty, available, np.maximum(-1, available - headroom))
        available[list(kept_rows)] = -1
        starts = workers.starts
        pools = workers.num_blocks[starts]
        equal = len(workers.reserves) == 1 and bool(len(pools)) and int(pools.min()) == int(pools.max())
        equal = equal and not workers.with_canaries
        return cls(
            workers=workers,
            available=available,
            greatest=int(available[starts].max(initial=-1)),
            pool=int(pools[0]) if equal else None,
        )

    def fits(self, waiting: QueuedRequest) -> bool:
        """Return whether a request could start somewhere now."""
        demand = waiting.demand
        if not (demand.embeds or demand.only):
            if waiting.need > self.greatest:
                return False
            if self.pool is not None and self.workers.suit(demand):
                return demand.num_total_blocks <= self.pool
        return bool(startable(demand, self.workers, self.available).any())


def could_hold(demand: Demand, workers: WorkerTable) -> bool:
    """Return whether the pool of any worker that could serve the request is large enough for all of it."""
    able = workers.able_for(demand, workers.starts_for(demand))
    return demand.num_total_blocks <= int(workers.num_blocks[able].max(initial=-1))


def is_of_gone_revision(demand: Demand, workers: WorkerTable) -> bool:
    """Return whether a request that no worker could hold could be held if it were of another revision or adapter."""
    if not (demand.files or demand.revision or demand.adapter):
        return False
    return could_hold(replace(demand, files="", revision="", adapter=""), workers)


def largest_pool(workers: WorkerTable) -> int:
    """Return the largest pool of a decode worker, or -1 without one."""
    return int(workers.num_blocks[workers.starts].max(initial=-1))


def first_to_free(demand: Demand, workers: WorkerTable, batch_block_share: float, kept: Collection[int]) -> int | None:
    """Return the row of the worker predicted to have capacity first if no other request starts there.

    Rows in `kept` are excluded. Requests end in no known order, so each worker is assumed to free an equal share of its
    used blocks per second: the smallest share that must be freed wins. None where no worker's pool could hold the
    request.
    """
    promised = np.array([demand.num_blocks_to_reserve(reserve) for reserve in workers.reserves], np.int64)
    if not len(promised):
        return None
    pools = workers.num_blocks
    headroom = np.ceil((1 - batch_block_share) * pools).astype(np.int64)
    needed = np.minimum(promised[workers.reserve_of] + headroom, pools)
    could = workers.able_for(demand, workers.starts_for(demand) & (pools >= demand.num_total_blocks))
    able = could.copy()
    able[list(kept)] = False
    able = workers.in_share(able, could, demand.traffic_hash)
    if not able.any():
        return None
    missing = np.maximum(0, needed - workers.available_blocks)
    part = missing / np.maximum(1, pools - workers.available_blocks)
    return int(np.where(able, part, np.inf).argmin())
