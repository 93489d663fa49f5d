"""Log of decisions with all their inputs, as JSON lines, from which each decision can be repeated.

A router's `decisions_file` has the same, and the outcomes.
"""

import json
from collections.abc import Sequence
from typing import TextIO

from kvcache.block_keys import BlockKey
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.place import Decision
from router.placement.rates import Ints, Priors
from router.placement.snapshots.decision_codec import recorded
from router.placement.snapshots.placement_snapshot import PlacementSnapshot


class LoggedFleet(Fleet):
    """Fleet with a log of its decisions."""

    def __init__(self, router_id: str, priors: Priors, learn_rates: bool, log: TextIO) -> None:
        super().__init__(router_id, priors, learn_rates)
        self._log = log

    def decide(self, demand: Demand, keys: Sequence[BlockKey], available: Ints | None = None) -> Decision | None:
        decision = super().decide(demand, keys, available)
        if decision is not None:
            assert self._decided is not None
            _, hits, _ = self._decided
            placement_snapshot = PlacementSnapshot(demand, self.snapshot, hits, self.rates, available)
            self._log.write(json.dumps(recorded(decision, placement_snapshot), separators=(",", ":")) + "\n")
        return decision
