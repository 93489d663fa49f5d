"""Backoff from workers that refused for lack of capacity although they seemed to have it.

Pure.
"""

from dataclasses import dataclass

import numpy as np

from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import WorkerRecord
from router.placement.rates import Ints

FADES_S = 0.1
"""Seconds without a report after which a refusal is forgotten."""
_NONE = np.iinfo(np.int64).max
"""Refused blocks of a worker that refused nothing."""


@dataclass(frozen=True, slots=True)
class _Backoff:
    num_blocks: int
    num_reports: int
    """Number of the worker's last load report when it refused; a newer report clears the backoff."""
    until: float


class CapacityBackoff:
    """Latest refusal of each worker."""

    def __init__(self) -> None:
        self._of: dict[WorkerRecord, _Backoff] = {}

    def add(self, worker: WorkerRecord, num_blocks: int, now: float) -> float:
        """Record that the worker refused `num_blocks`; return when this is forgotten."""
        self._of[worker] = _Backoff(num_blocks, worker.num_reports, now + FADES_S)
        return now + FADES_S

    def column(self, fleet: Fleet, now: float) -> Ints:
        """Return, for each worker of the snapshot, the number of blocks it refused, or more than any pool: [W]."""
        workers = fleet.snapshot
        column = np.full(len(workers.ids), _NONE)
        for worker, rebuff in list(self._of.items()):
            joined = fleet.worker(worker.worker_id) is worker and worker.worker_id in workers.row_of
            if not joined or worker.num_reports != rebuff.num_reports or now >= rebuff.until:
                del self._of[worker]
            else:
                column[workers.row_of[worker.worker_id]] = rebuff.num_blocks
        return column
