"""`place`: the placement decision, one pure function over the worker table.

Every way to start the request now gets a predicted cost in seconds: a decode worker, and how it gets the blocks it
lacks. It may compute them itself; read those that another worker holds, which that worker lends at once; or borrow all
from a prefill worker, which computes what it lacks, and may itself read a part from the source that saves most.

The cheapest wins. `terms.py` has the terms of the cost, `costs.py` adds them for all candidates.
"""

from dataclasses import dataclass, field

import numpy as np

from router.placement.costs import Costs
from router.placement.demand import Alternative, Candidate, Demand
from router.placement.pairs import Inputs
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

    The worker must have the request's adapter and read its items. The traffic hash decides between canaries and other
    workers. A worker that could not hold the whole request would refuse it for good.
    """
    by_reserve = [demand.num_blocks_to_reserve(reserve) for reserve in workers.reserves]
    promised = by_reserve[0] if len(by_reserve) == 1 else np.array(by_reserve, np.int64)[workers.reserve_of]
    free_blocks = workers.available_blocks if available is None else available
    could: Bools = workers.starts_for(demand) & (workers.num_blocks >= demand.num_total_blocks)
    could = workers.able_for(demand, could)
    return workers.in_share(could & (free_blocks >= promised), could, demand.traffic_hash)


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
    best, num_candidates, alternatives = Costs(Inputs(demand, workers, hits, rates), rows).cheapest()
    reason = _reason(demand, workers, hits, best)
    return decision_of(best, num_candidates, reason, alternatives)


def decision_of(
    best: Candidate, num_candidates: int, reason: str, alternatives: tuple[Alternative, ...] = ()
) -> Decision:
    """Return the decision for a candidate."""
    return Decision(
        decode_id=best.decode_id,
        lender_id=best.lender_id,
        lender_computes=best.lender_computes,
        source_id=best.source_id,
        lender_tokens=best.lender_tokens,
        own_tokens=best.own_tokens,
        predicted_ttft_s=best.ttft_s,
        cost_s=best.cost_s,
        num_candidates=num_candidates,
        reason=reason,
        hit_blocks=best.hit_blocks,
        held_bytes=best.held_bytes,
        source_bytes=best.source_bytes,
        waiting_bytes=best.waiting_bytes + best.source_waiting_bytes,
        reserved_output_tokens=best.reserved_output_tokens,
        reservation=best.reservation,
        alternatives=alternatives,
    )


def explain(
    demand: Demand, workers: WorkerTable, hits: Hits, rates: Rates, available: Ints | None = None
) -> list[Candidate]:
    """Return all candidates to start the request now, the choice of `place` first; empty where it returns None."""
    rows = np.flatnonzero(startable(demand, workers, available))
    return Costs(Inputs(demand, workers, hits, rates), rows).candidates() if len(rows) else []


def _reason(demand: Demand, workers: WorkerTable, hits: Hits, best: Candidate) -> str:
    """Return the reason in words that a user can check against the receipt."""
    usable, decode = demand.num_usable_blocks, workers.row_of[best.decode_id]
    running = workers.running.item(decode)
    same = "; served the last request of this session" if best.is_last_decode else ""

    def held(row: int) -> int:
        return min(int(hits.held.item(row)), usable)

    if usable == 0:
        return f"nothing to borrow: a short prompt, or one computed as a whole; {running} running{same}"
    holds = f"holds {held(decode)} of {usable} usable blocks, {running} running"
    if best.lender_id is None:
        kept = "nothing to borrow" if held(decode) >= usable else "cheaper than any loan"
        return f"{holds}; {kept}{same}"
    if not best.lender_computes:
        return f"{holds}; lender holds {best.num_blocks}, computes none{same}"
    lender = workers.row_of[best.lender_id]
    due = min(int(hits.due.item(lender)), usable)
    reason = f"{holds}; lender holds {due}, {workers.queued_prefill_tokens.item(lender)} tokens queued there"
    if best.source_id is not None:
        reason = f"{reason}; reads up to {held(workers.row_of[best.source_id])} from {best.source_id}"
    return reason + same
