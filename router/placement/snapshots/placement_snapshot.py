"""Inputs of a decision as they were, for later questions.

Pure.
"""

from dataclasses import dataclass, replace

from router.placement.candidates import Candidate
from router.placement.demand import Demand
from router.placement.place import explain
from router.placement.rates import Ints, Rates
from router.placement.worker_table import Hits, WorkerTable

FIXED_BYTES = 4096
"""Approximate bytes of the objects around the arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacementSnapshot:
    """Inputs of one decision, never changed."""

    demand: Demand
    workers: WorkerTable
    hits: Hits
    rates: Rates
    available: Ints | None
    """Blocks that the request could use of each worker, if not all."""

    @classmethod
    def of(
        cls, demand: Demand, workers: WorkerTable, hits: Hits, rates: Rates, available: Ints | None
    ) -> "PlacementSnapshot":
        """Copy the inputs; only `workers` may change afterwards."""
        frozen = replace(
            workers,
            draining=workers.draining.copy(),
            running=workers.running.copy(),
            decoding=workers.decoding.copy(),
            queued_prefill_tokens=workers.queued_prefill_tokens.copy(),
            available_blocks=workers.available_blocks.copy(),
            num_blocks=workers.num_blocks.copy(),
            outgoing_bytes=workers.outgoing_bytes.copy(),
            outgoing_flows=workers.outgoing_flows.copy(),
            incoming_bytes=workers.incoming_bytes.copy(),
            incoming_flows=workers.incoming_flows.copy(),
        )
        kept = replace(demand, other_keys=()) if demand.other_keys else demand  # their result is in `hits`
        return cls(kept, frozen, hits, rates, available)

    def candidates(self) -> list[Candidate]:
        """Return the compared candidates, the chosen one first."""
        return explain(self.demand, self.workers, self.hits, self.rates, self.available)

    def num_bytes(self, before: "PlacementSnapshot | None") -> int:
        """Return the approximate memory, without what it shares with the previous snapshot."""
        columns = 20 * 8 * len(self.workers.ids)
        shared = before is not None and before.rates.kv_bytes_per_s is self.rates.kv_bytes_per_s
        return FIXED_BYTES + columns + (0 if shared else 2 * self.rates.kv_bytes_per_s.nbytes)
