"""Workers as their router knows them, and what is placed on them: the records that `fleet.py` keeps."""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.keys import BlockKey
from protos import membership_pb2 as pb
from router.placement.demand import Demand
from router.placement.situation import Situation
from router.placement.snapshot import WorkerView


@dataclass(slots=True, eq=False)
class Worker:
    """One membership: from Hello to the end of its stream."""

    hello: pb.Hello
    load: pb.LoadReport | None = None
    num_reports: int = 0
    """Of load; the last of them may have said nothing new."""
    next_cache_sequence: int | None = None
    """None until the first snapshot."""
    lost: bool = False
    """Its engine fell silent; calls to it are cancelled."""
    on_lost: set[Callable[[], object]] = field(default_factory=set)
    decodes_unseen: "set[Placed]" = field(default_factory=set)
    """Placements on it that no report of its has seen."""
    lends_unseen: "set[Placed]" = field(default_factory=set)
    """Likewise as a lender, until their first token."""
    num_cached: int = 0
    """Blocks that it said it holds."""
    asked_blocks: int = 0
    """Of prompts that it was to compute or lend, in streams that ended well."""
    hit_blocks: int = 0
    """Of those, what it had already."""
    draining: bool = False
    """It was told to stop: it takes nothing more, and can be read. For good."""
    shunned: bool = False
    """What was placed on it failed: nothing starts there for a while."""
    failing: bool = False
    """That, or it is to be seen whether it works again."""
    failing_lenders: "set[Worker]" = field(default_factory=set)
    """Likewise, those from whom its loans failed."""

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    @property
    def decodes(self) -> bool:
        return self.hello.role == pb.ROLE_DECODE


@dataclass(slots=True, eq=False)
class Placed:
    """A placement under way."""

    sequence: int
    decode: Worker
    lender: Worker | None
    lender_tokens: int
    own_tokens: int
    """What the decode worker computes of the prompt."""
    lender_computes: bool
    source: Worker | None
    demand: Demand
    keys: tuple[BlockKey, ...]
    predicted_ttft_s: float
    situation: Situation | None
    """Where these are kept; whoever keeps it takes it away from here."""
    decode_before: WorkerView
    """As they were without it."""
    lender_before: WorkerView | None
    started: bool = False
    """Its first token has come: the caches hold what it left in them, and have said so."""
    failed: bool = False
    """Its decode worker failed it."""
    lent: bool | None = None
    """Whether its lender lent; None: that is not known, or nothing had to be lent."""

    @property
    def num_streams(self) -> int:
        return max(1, len(self.demand.chain_tokens))
