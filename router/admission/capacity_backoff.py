"""Workers that refused for want of room although they seemed to have it. Pure."""

from dataclasses import dataclass

import numpy as np

from router.placement.fleet import Fleet
from router.placement.rates import Ints
from router.placement.worker_records import Worker

FADES_S = 0.1
"""A worker is not asked for as much again until it reports, or for so long."""


@dataclass(frozen=True, slots=True)
class _Backoff:
    num_blocks: int
    num_reports: int
    """It had sent by then; the next one says more."""
    until: float


class CapacityBackoff:
    """The last word of each worker that refused."""

    def __init__(self) -> None:
        self._of: dict[Worker, _Backoff] = {}

    def add(self, worker: Worker, num_blocks: int, now: float) -> float:
        """It had no room for so many. Returns when that will be forgotten."""
        self._of[worker] = _Backoff(num_blocks, worker.num_reports, now + FADES_S)
        return now + FADES_S

    def column(self, fleet: Fleet, now: float) -> Ints:
        """[W] of the fleet's snapshot: what each worker has said to be too much; without a word, more than anything."""
        workers = fleet.snapshot
        column = np.full(len(workers.ids), np.iinfo(np.int64).max)
        for worker, rebuff in list(self._of.items()):
            there = fleet.worker(worker.worker_id) is worker and worker.worker_id in workers.row_of
            if not there or worker.num_reports != rebuff.num_reports or now >= rebuff.until:
                del self._of[worker]
            else:
                column[workers.row_of[worker.worker_id]] = rebuff.num_blocks
        return column
