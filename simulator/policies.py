"""Other placement policies, to compare with `router/placement/place.py`.

No part of Tandem routes by them.

Each is asked where and when placement would be: by the real admission, with the real fleet's snapshot.
"""

from abc import abstractmethod
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from engine.block_keys import BlockKey
from router.placement.candidates import Route, assess
from router.placement.demand import Demand
from router.placement.fleet import Fleet
from router.placement.place import Decision, startable
from router.placement.rates import Ints
from router.placement.worker_records import ActivePlacement
from router.placement.worker_table import Hits

PREFIX_TOKENS = 1024
"""Number of leading tokens by which the prefix hash chooses."""


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
        way = self._choose(demand, keys, hits, decoders, lenders if demand.num_usable_blocks else lenders[:0])
        if way.lender is not None and min(int(hits.held[way.decode]), demand.num_usable_blocks) == len(keys):
            way = Route(way.decode)  # it holds everything
        best = assess(demand, workers, hits, self.rates, way)
        return Decision(
            decode_id=best.decode_id,
            lender_id=best.lender_id,
            lender_computes=best.lender_computes,
            source_id=best.source_id,
            lender_tokens=best.lender_tokens,
            own_tokens=best.own_tokens,
            predicted_ttft_s=best.ttft_s,
            cost_s=best.cost_s,
            hit_blocks=best.hit_blocks,
            held_bytes=best.held_bytes,
            source_bytes=best.source_bytes,
            num_candidates=1,
            reason=type(self).__name__,
        )

    @abstractmethod
    def _choose(self, demand: Demand, keys: Sequence[BlockKey], hits: Hits, decoders: Ints, lenders: Ints) -> Route:
        """Return the route for these rows: at least one decoder, and no lender where nothing is to be lent."""


class RoundRobin(PolicyFleet):
    """Workers in turn."""

    _next = 0

    def placed(self, decision: Decision, demand: Demand, keys: Sequence[BlockKey]) -> ActivePlacement:
        self._next += 1
        return super().placed(decision, demand, keys)

    def _choose(self, demand: Demand, keys: Sequence[BlockKey], hits: Hits, decoders: Ints, lenders: Ints) -> Route:
        decode = int(decoders[self._next % len(decoders)])
        return _lend(decode, int(lenders[self._next % len(lenders)]) if len(lenders) else None)


class LeastLoaded(PolicyFleet):
    """The worker with the fewest queued prompt tokens, then the fewest streams, then the most blocks."""

    def _choose(self, demand: Demand, keys: Sequence[BlockKey], hits: Hits, decoders: Ints, lenders: Ints) -> Route:
        return _lend(self._least(decoders), self._least(lenders) if len(lenders) else None)

    def _least(self, rows: Ints) -> int:
        workers = self.snapshot
        order = (-workers.available_blocks[rows], workers.running[rows], workers.queued_prefill_tokens[rows])
        return int(rows[np.lexsort(order)[0]])


class PrefixHash(PolicyFleet):
    """Worker by the hash of the prompt's first blocks over all workers, so that equal prefixes meet.

    Where the chosen worker has no capacity, the next one that has.
    """

    def _choose(self, demand: Demand, keys: Sequence[BlockKey], hits: Hits, decoders: Ints, lenders: Ints) -> Route:
        leading = keys[max(0, min(len(keys), PREFIX_TOKENS // demand.block_tokens) - 1)] if keys else b""
        decode = self._ranked(leading, np.flatnonzero(self.snapshot.decodes & (self.snapshot.num_blocks > 0)), decoders)
        return _lend(decode, self._ranked(leading, np.flatnonzero(~self.snapshot.decodes), lenders))

    def _ranked(self, key: bytes, rows: Ints, able: Ints) -> int | None:
        able_rows = set(able.tolist())
        start = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") % max(1, len(rows))
        return next((row for row in np.roll(rows, -start).tolist() if row in able_rows), None)


class AlwaysLend(PolicyFleet):
    """Placement by the real costs, except that a prefill worker computes every prompt: `disaggregated`."""

    def _choose(self, demand: Demand, keys: Sequence[BlockKey], hits: Hits, decoders: Ints, lenders: Ints) -> Route:
        ways = [Route(int(decode)) for decode in decoders]
        if len(lenders):
            running = self.snapshot.running[decoders]
            first = int(decoders[running.argmin()])
            by_lender = [Route(first, int(lender), computes=True) for lender in lenders]
            lender = min(by_lender, key=lambda way: self._cost_s(demand, hits, way)).lender
            ways = [Route(int(decode), lender, computes=True) for decode in decoders]
        return min(ways, key=lambda way: self._cost_s(demand, hits, way))

    def _cost_s(self, demand: Demand, hits: Hits, way: Route) -> float:
        return assess(demand, self.snapshot, hits, self.rates, way).cost_s


def _lend(decode: int | None, lender: int | None) -> Route:
    assert decode is not None
    return Route(decode) if lender is None else Route(decode, lender, computes=True)
