"""Other placement policies, to compare with `router/placement/place.py`.

No part of Tandem routes by them.

Each is asked where and when placement would be: by the real admission, with the real fleet's snapshot.
"""

from abc import abstractmethod
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from kvcache.block_keys import BlockKey
from router.placement.costs import CostedPairs
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import ActivePlacement
from router.placement.pairs import DecodeWorkers, Inputs, Pairs
from router.placement.place import Decision, decision_of, startable
from router.placement.rates import Ints
from router.placement.worker_table import Hits

PREFIX_TOKENS = 1024
"""Number of leading tokens by which the prefix hash chooses."""
Way = tuple[int, int | None]
"""Rows of the decode worker and of the lender that computes; None: the decode worker computes."""


class PolicyFleet(Fleet):
    """Fleet in which prefill workers compute all prompts, or decode workers where there are none."""

    def decide(self, demand: Demand, keys: Sequence[BlockKey], available: Ints | None = None) -> Decision | None:
        workers = self.snapshot
        decoders = np.flatnonzero(startable(demand, workers, available))
        if not len(decoders):
            return None
        large = workers.num_blocks >= demand.num_usable_blocks
        lenders = np.flatnonzero(~workers.decodes & ~workers.draining & large)
        hits = self.hits(keys)
        decode, lender = self._choose(
            demand, keys, hits, decoders, lenders if demand.num_usable_blocks else lenders[:0]
        )
        if min(int(hits.held[decode]), demand.num_usable_blocks) == len(keys):
            lender = None  # the decode worker holds everything
        costs = self._costs(demand, hits, np.array([decode]), np.array([] if lender is None else [lender], np.int64))
        return decision_of(costs.candidate(0, 0), 1, type(self).__name__)

    def _costs(self, demand: Demand, hits: Hits, decoders: Ints, lenders: Ints) -> CostedPairs:
        """Return the costs of the decoders with each of the lenders, or alone where there are none.

        No lender reads from others what it could compute.
        """
        inputs = Inputs(demand, self.snapshot, hits, self.rates, with_sources=False)
        decode = DecodeWorkers(inputs, decoders)
        return CostedPairs(
            Pairs(inputs, decode, "computing", lenders) if len(lenders) else Pairs(inputs, decode, "alone")
        )

    @abstractmethod
    def _choose(self, demand: Demand, keys: Sequence[BlockKey], hits: Hits, decoders: Ints, lenders: Ints) -> Way:
        """Return the way for these rows: at least one decoder, and no lender where nothing is to be lent."""


class RoundRobin(PolicyFleet):
    """Workers in turn."""

    _next = 0

    def placed(self, decision: Decision, demand: Demand, keys: Sequence[BlockKey]) -> ActivePlacement:
        self._next += 1
        return super().placed(decision, demand, keys)

    def _choose(self, demand: Demand, keys: Sequence[BlockKey], hits: Hits, decoders: Ints, lenders: Ints) -> Way:
        decode = int(decoders[self._next % len(decoders)])
        return decode, int(lenders[self._next % len(lenders)]) if len(lenders) else None


class LeastLoaded(PolicyFleet):
    """The worker with the fewest queued prompt tokens, then the fewest streams, then the most blocks."""

    def _choose(self, demand: Demand, keys: Sequence[BlockKey], hits: Hits, decoders: Ints, lenders: Ints) -> Way:
        return self._least(decoders), self._least(lenders) if len(lenders) else None

    def _least(self, rows: Ints) -> int:
        workers = self.snapshot
        order = (-workers.available_blocks[rows], workers.running[rows], workers.queued_prefill_tokens[rows])
        return int(rows[np.lexsort(order)[0]])


class PrefixHash(PolicyFleet):
    """Worker by the hash of the prompt's first blocks over all workers, so that equal prefixes meet.

    Where the chosen worker has no capacity, the next one that has.
    """

    def _choose(self, demand: Demand, keys: Sequence[BlockKey], hits: Hits, decoders: Ints, lenders: Ints) -> Way:
        leading = keys[max(0, min(len(keys), PREFIX_TOKENS // demand.block_tokens) - 1)] if keys else b""
        decode = self._ranked(leading, np.flatnonzero(self.snapshot.decodes & (self.snapshot.num_blocks > 0)), decoders)
        assert decode is not None
        return decode, self._ranked(leading, np.flatnonzero(~self.snapshot.decodes), lenders)

    def _ranked(self, key: bytes, rows: Ints, able: Ints) -> int | None:
        able_rows = set(able.tolist())
        start = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") % max(1, len(rows))
        return next((row for row in np.roll(rows, -start).tolist() if row in able_rows), None)


class AlwaysLend(PolicyFleet):
    """Placement by the real costs, except that a prefill worker computes every prompt: `disaggregated`."""

    def _choose(self, demand: Demand, keys: Sequence[BlockKey], hits: Hits, decoders: Ints, lenders: Ints) -> Way:
        cost_s = self._costs(demand, hits, decoders, lenders).cost_s
        if not len(lenders):
            return int(decoders[cost_s.argmin()]), None
        lender = cost_s[self.snapshot.running[decoders].argmin()].argmin()
        return int(decoders[cost_s[:, lender].argmin()]), int(lenders[lender])
