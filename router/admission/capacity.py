"""On which workers a class may start: what batch must leave free, who has just refused, which are kept. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from router.admission.request import QueuedRequest
from router.placement.demand import Demand
from router.placement.place import startable
from router.placement.rates import Ints
from router.placement.worker_table import WorkerTable


@dataclass(frozen=True, slots=True, eq=False)
class Capacity:
    """What one class may take of each worker now."""

    workers: WorkerTable
    available: Ints
    """[W] blocks; -1 where it may start nothing."""
    greatest: int
    """Of any decode worker. Less than a request's `need`: it cannot start."""
    pool: int | None
    """Of every decode worker, where pools and promises are equal: then `greatest` and it say all."""

    @classmethod
    def of(
        cls, workers: WorkerTable, kept_rows: Collection[int], refused: Ints, batch_block_share: float
    ) -> "Capacity":
        """`kept_rows` are others'. `refused`: [W], what a worker has just refused, which then is more than it has."""
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
        """Whether it could start somewhere now."""
        if waiting.need > self.greatest:
            return False
        if self.pool is not None:
            return waiting.demand.num_total_blocks <= self.pool
        return bool(startable(waiting.demand, self.workers, self.available).any())


def could_hold(demand: Demand, workers: WorkerTable) -> bool:
    """Whether any decode worker's pool is large enough for all of it."""
    return demand.num_total_blocks <= largest_pool(workers)


def largest_pool(workers: WorkerTable) -> int:
    """-1 where there is no decode worker."""
    return int(workers.num_blocks[workers.starts].max(initial=-1))


def first_to_free(demand: Demand, workers: WorkerTable, batch_block_share: float, kept: Collection[int]) -> int | None:
    """The row of the worker predicted to have room for it first, if nobody else starts there; not one of `kept`.

    Requests end in no known order, so each worker is taken to free an equal part of its used blocks in a given time:
    the least part that must go before there is room wins. None where no worker's pool could hold it.
    """
    promised = np.array([demand.num_promised_blocks(reserve) for reserve in workers.reserves], np.int64)
    if not len(promised):
        return None
    pools = workers.num_blocks
    headroom = np.ceil((1 - batch_block_share) * pools).astype(np.int64)
    needed = np.minimum(promised[workers.reserve_of] + headroom, pools)
    could = workers.starts & (pools >= demand.num_total_blocks)
    able = could.copy()
    able[list(kept)] = False
    able = workers.in_share(able, could, demand.traffic_hash)
    if not able.any():
        return None
    missing = np.maximum(0, needed - workers.available_blocks)
    part = missing / np.maximum(1, pools - workers.available_blocks)
    return int(np.where(able, part, np.inf).argmin())
