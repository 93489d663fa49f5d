"""Workers as their router knows them, and what is placed on them: the records that `fleet.py` keeps."""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.kv.block_keys import BlockKey
from protos import membership_pb2 as pb
from router.placement.demand import Demand
from router.placement.placement_snapshot import PlacementSnapshot


class UnreportedPlacements:
    """Placements that a worker's reports do not count yet, and what they come to."""

    __slots__ = ("_taken", "blocks", "streams", "tokens")

    def __init__(self) -> None:
        self.streams = 0
        self.tokens = 0
        """Still to be computed."""
        self.blocks = 0
        """Promised."""
        self._taken: dict[ActivePlacement, tuple[int, int, int]] = {}
        """Streams, tokens and blocks of each."""

    def __len__(self) -> int:
        return len(self._taken)

    def __contains__(self, placed: "ActivePlacement") -> bool:
        return placed in self._taken

    def add(self, placed: "ActivePlacement", streams: int = 0, tokens: int = 0, blocks: int = 0) -> None:
        self._taken[placed] = streams, tokens, blocks
        self._count(streams, tokens, blocks)

    def computed(self, placed: "ActivePlacement") -> None:
        """One that is there: its tokens are."""
        streams, tokens, blocks = self._taken[placed]
        self._taken[placed] = streams, 0, blocks
        self.tokens -= tokens

    def remove(self, placed: "ActivePlacement") -> None:
        """One that is there."""
        streams, tokens, blocks = self._taken.pop(placed)
        self._count(-streams, -tokens, -blocks)

    def see(self, sequence: int) -> None:
        """A report counts all that were placed up to this one."""
        for placed in [placed for placed in self._taken if placed.sequence <= sequence]:
            self.remove(placed)

    def _count(self, streams: int, tokens: int, blocks: int) -> None:
        self.streams += streams
        self.tokens += tokens
        self.blocks += blocks


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
    unreported_decodes: UnreportedPlacements = field(default_factory=UnreportedPlacements)
    """Placements on it that no report of its has seen."""
    unreported_lends: UnreportedPlacements = field(default_factory=UnreportedPlacements)
    """Likewise as a lender, until their first token."""
    num_cached: int = 0
    """Blocks that it said it holds."""
    asked_blocks: int = 0
    """Of prompts that it was to compute or lend, in streams that ended well."""
    hit_blocks: int = 0
    """Of those, what it had already."""
    draining: bool = False
    """It was told to stop: it takes nothing more, and can be read. For good."""
    avoided: bool = False
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
class ActivePlacement:
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
    placement_snapshot: PlacementSnapshot | None
    """Where these are kept; whoever keeps it takes it away from here."""
    running_before: int
    """On the decode worker, without it."""
    queued_before: tuple[int, int]
    """Tokens of prompts that wait at the decode worker and at the lender, without its own."""
    started: bool = False
    """Its first token has come: the caches hold what it left in them, and have said so."""
    failed: bool = False
    """Its decode worker failed it."""
    lent: bool | None = None
    """Whether its lender lent; None: that is not known, or nothing had to be lent."""

    @property
    def num_streams(self) -> int:
        return max(1, len(self.demand.chain_tokens))
