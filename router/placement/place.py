"""`place`: the placement decision, one pure function over the worker table.

Every way to start the request now gets a predicted cost in seconds: a decode worker, and how it gets the blocks it
lacks. It may compute them itself; read those that another worker holds, which that worker lends at once; or borrow all
from a prefill worker, which computes what it lacks, and may itself read a part from the source that saves most.

    TTFT     the lender's queue, its reads and computing, the transfer of what the decode worker lacks, and what
             the decode worker computes itself
    + delay  what computing on the decode worker costs each of its decoding streams, and what one more stream costs all
    - a small share of both for the workers that served the session's last request (affinity.py)

The cheapest wins. `candidates.py` computes the cost of one candidate, `pair_costs.py` those of all.
"""

from dataclasses import dataclass, field

import numpy as np

from router.placement.candidates import Candidate, Route, assess
from router.placement.demand import Demand
from router.placement.pair_costs import Alternative, Costs
from router.placement.rates import Bools, Ints, Rates
from router.placement.worker_table import Hits, WorkerTable


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen workers; without `lender_id` the decode worker computes the prompt itself."""

    decode_id: str
    lender_id: str | None
    lender_computes: bool
    """Whether the lender computes blocks it lacks; otherwise it lends what it holds."""
    source_id: str | None
    """Worker from which the lender reads blocks it lacks before it computes the rest."""
    lender_tokens: int
    """Tokens that the lender will compute."""
    own_tokens: int
    """Tokens that the decode worker will compute."""
    predicted_ttft_s: float
    cost_s: float
    num_candidates: int
    reason: str
    hit_blocks: int = 0
    """Predicted blocks of the prompt that no worker computes."""
    held_bytes: int = 0
    """Bytes that the decode worker reads and no worker computes first."""
    source_bytes: int = 0
    """Bytes that the lender reads from its source."""
    waiting_bytes: float = 0.0
    """Bytes in flight of other placements that delay both."""
    reserved_output_tokens: int = 0
    """Output tokens of each choice that the decode worker reserves blocks for."""
    reservation: str = ""
    """Origin of that number, for display."""
    alternatives: tuple[Alternative, ...] = field(default=(), compare=False)
    """The next best candidates."""


def startable(demand: Demand, workers: WorkerTable, available: Ints | None = None) -> Bools:
    """Return which decode workers can start the request now, [W], by `available` blocks if given.

    The worker must have the request's adapter. The traffic hash decides between canaries and other workers. A worker
    that could not hold the whole request would refuse it for good.
    """
    promised = np.array([demand.num_promised_blocks(reserve) for reserve in workers.reserves], np.int64)
    free_blocks = workers.available_blocks if available is None else available
    could: Bools = workers.starts_for(demand) & (workers.num_blocks >= demand.num_total_blocks)
    could = workers.with_adapter(could, demand.adapter)
    return workers.in_share(could & (free_blocks >= promised[workers.reserve_of]), could, demand.traffic_hash)


def place(
    demand: Demand, workers: WorkerTable, hits: Hits, rates: Rates, available: Ints | None = None
) -> Decision | None:
    """Return the cheapest candidate, or None when no decode worker can start the request now.

    `available` are the blocks it may use of each. Ties go to the first in order of worker ids.
    """
    rows = np.flatnonzero(startable(demand, workers, available))
    return place_on(rows, demand, workers, hits, rates) if len(rows) else None


def place_on(rows: Ints, demand: Demand, workers: WorkerTable, hits: Hits, rates: Rates) -> Decision:
    """Return the cheapest candidate on the decode workers of `rows`, which are not empty."""
    way, num_candidates, alternatives = Costs(demand, workers, hits, rates, rows).cheapest()
    best = assess(demand, workers, hits, rates, way)
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
        waiting_bytes=best.waiting_bytes + best.source_waiting_bytes,
        reserved_output_tokens=best.reserved_output_tokens,
        reservation=best.reservation,
        num_candidates=num_candidates,
        reason=_reason(demand, workers, hits, way, best),
        alternatives=alternatives,
    )


def _reason(demand: Demand, workers: WorkerTable, hits: Hits, way: Route, best: Candidate) -> str:
    """Return the reason in words that a user can check against the receipt."""
    usable, running = demand.num_usable_blocks, int(workers.running[way.decode])
    same = "; served the last request of this session" if best.is_last_decode else ""

    def held(row: int) -> int:
        return min(int(hits.held[row]), usable)

    if usable == 0:
        return f"nothing to borrow: a short prompt, or one computed as a whole; {running} running{same}"
    holds = f"holds {held(way.decode)} of {usable} usable blocks, {running} running"
    if way.lender is None:
        kept = "nothing to borrow" if held(way.decode) >= usable else "cheaper than any loan"
        return f"{holds}; {kept}{same}"
    if not best.lender_computes:
        return f"{holds}; lender holds {best.num_blocks}, computes none{same}"
    due = min(int(hits.due[way.lender]), usable)
    queued = int(workers.queued_prefill_tokens[way.lender])
    reason = f"{holds}; lender holds {due}, {queued} tokens queued there"
    reason = reason if way.source is None else f"{reason}; reads up to {held(way.source)} from {best.source_id}"
    return reason + same
