"""Requests as admission sees them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.block_keys import BlockKey
from router.placement.demand import Demand
from router.placement.worker_table import WorkerTable


@dataclass(slots=True, eq=False)
class RequestInfo:
    """A request for as long as the router has it, over all its placements.

    Times are seconds of one clock.
    """

    tenant: str
    priority: int
    arrived_at: float
    deadline: float = math.inf
    """Deadline of the whole request."""
    first_token_by: float = math.inf
    streaming: bool = False
    """Whether the client has received something, so there is no first token to be late any more."""
    num_placed: int = 0
    num_refusals: int = 0
    """Refusals by workers for lack of capacity."""
    not_before: float = -math.inf
    """Earliest next attempt after a worker's refusal."""

    @property
    def due_at(self) -> float:
        """Time after which starting the request is useless."""
        return self.deadline if self.streaming else min(self.deadline, self.first_token_by)


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that waits for a placement."""

    info: RequestInfo
    demand: Demand
    keys: Sequence[BlockKey]
    number: int
    """Number in order of arrival."""
    queued_at: float
    order: tuple[float, float, int]
    """Sort key within tenant and class: due, arrived, number."""
    cost: int = 0
    """Cost for fairness, in tokens."""
    need: int = 0
    """Smallest number of blocks with which a decode worker can start it, if workers reserve different amounts of
    output; -1 for an embedding and for a request of certain workers, whatever they need."""
    queued: bool = False
    least_ttft_s: float = 0.0
    stream_s: float = 0.0
    """Predicted seconds from first token to end."""
    held_by: str | None = None
    """Lender that was too busy for it."""
    held_until: float = -math.inf
    passed_at: float | None = None
    """Time when it was first skipped for lack of capacity while a later request started."""
    passed_mark: int = 0
    """Tokens by which its class had been overtaken at that time."""
    unholdable_since: float | None = None

    @classmethod
    def of(
        cls, info: RequestInfo, demand: Demand, keys: Sequence[BlockKey], number: int, now: float
    ) -> "QueuedRequest":
        return cls(info, demand, keys, number, now, (info.due_at, info.arrived_at, number))

    def measure(self, workers: WorkerTable) -> None:
        """Compute cost and need for these workers."""
        reserves = workers.reserves or (0,)
        # Decode workers' largest capacity says nothing about these: each worker is asked, see Capacity.fits.
        self.need = (
            -1
            if self.demand.embeds or self.demand.only
            else min(self.demand.num_blocks_to_reserve(each) for each in reserves)
        )
        self.cost = cost_of(self.demand, max(reserves))

    @property
    def num_sequences(self) -> int:
        """Number of sequences that run at the same time."""
        return max(1, len(self.demand.chain_tokens))

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens for which blocks are reserved."""
        return max(0, self.cost - self.demand.num_tokens)

    @property
    def start_by(self) -> float:
        """Time after which it would be late even with empty queues."""
        return self.latest_first_token - self.least_ttft_s

    @property
    def latest_first_token(self) -> float:
        """Latest useful time of the first token, so that the rest is in time too.

        A request that has streamed continues as long as it may; so does one whose rest would be too long wherever it
        began, since its real length is unknown and `max_tokens` only bounds it.
        """
        info = self.info
        if info.streaming:
            return info.deadline
        for_the_rest = info.deadline - self.stream_s
        if for_the_rest < info.arrived_at + self.least_ttft_s:
            for_the_rest = info.deadline
        return min(info.first_token_by, for_the_rest)


def cost_of(demand: Demand, reserve_output_tokens: int) -> int:
    """Tokens of the prompt, and of the output that is promised blocks; what choices share counts once."""
    if not demand.chain_tokens:
        return demand.num_tokens
    reserve = demand.reserved_output_tokens(reserve_output_tokens) or demand.max_chain_tokens
    ends = (min(demand.max_chain_tokens, tokens + reserve) for tokens in demand.chain_tokens)
    return sum(ends) - (len(demand.chain_tokens) - 1) * demand.shared_tokens
