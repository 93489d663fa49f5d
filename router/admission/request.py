"""What waits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv.block_keys import BlockKey
from router.placement.demand import Demand
from router.placement.worker_table import WorkerTable


@dataclass(slots=True, eq=False)
class RequestInfo:
    """A request for as long as the router has it, however often it is placed. Times are seconds of one clock."""

    tenant: str
    priority: int
    arrived_at: float
    deadline: float = math.inf
    """Of the whole."""
    first_token_by: float = math.inf
    streaming: bool = False
    """The client has had something of it: there is no first token to be late any more."""
    num_placed: int = 0
    num_refusals: int = 0
    """By workers, for want of room."""
    not_before: float = -math.inf
    """A worker has just refused it."""

    @property
    def due_at(self) -> float:
        """When it is worth nothing if it has not started by then."""
        return self.deadline if self.streaming else min(self.deadline, self.first_token_by)


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A claim that waits for a placement."""

    info: RequestInfo
    demand: Demand
    keys: Sequence[BlockKey]
    number: int
    """In order of arrival."""
    queued_at: float
    order: tuple[float, float, int]
    """Within its tenant and class: due, arrived, number."""
    cost: int = 0
    """Tokens, as fairness counts them."""
    need: int = 0
    """Blocks: without so many no worker can start it. The least, if workers promise different amounts of output."""
    queued: bool = False
    least_ttft_s: float = 0.0
    stream_s: float = 0.0
    """Predicted from its first token to its end."""
    held_by: str | None = None
    """The lender that was too deep in work for it."""
    held_until: float = -math.inf
    passed_at: float | None = None
    """When it first had its turn and no room, and another went."""
    passed_mark: int = 0
    """What its class had been passed by then."""
    unholdable_since: float | None = None

    @classmethod
    def of(
        cls, info: RequestInfo, demand: Demand, keys: Sequence[BlockKey], number: int, now: float
    ) -> "QueuedRequest":
        return cls(info, demand, keys, number, now, (info.due_at, info.arrived_at, number))

    def measure(self, workers: WorkerTable) -> None:
        """What it needs of these workers."""
        reserves = workers.reserves or (0,)
        self.need = min(self.demand.num_promised_blocks(reserve) for reserve in reserves)
        self.cost = cost_of(self.demand, max(reserves))

    @property
    def num_output_tokens(self) -> int:
        """That it is promised blocks for."""
        return max(0, self.cost - self.demand.num_tokens)

    @property
    def start_by(self) -> float:
        """Started later, it would come too late even where nothing is queued."""
        return self.latest_first_token - self.least_ttft_s

    @property
    def latest_first_token(self) -> float:
        """For it to be in time, and the rest too. Who has had tokens goes on as long as it may; so does a request whose
        rest would be too long wherever it began: how much it will say is a guess, of which `max_tokens` is the bound.
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
    reserve = reserve_output_tokens or demand.max_chain_tokens
    ends = (min(demand.max_chain_tokens, tokens + reserve) for tokens in demand.chain_tokens)
    return sum(ends) - (len(demand.chain_tokens) - 1) * demand.shared_tokens
