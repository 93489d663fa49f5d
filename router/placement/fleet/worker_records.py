"""Records of workers and of placements, which `fleet.py` keeps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from kvcache.block_keys import BlockKey
from protos import membership_pb2 as pb
from router.placement.demand import Demand
from router.placement.in_flight import Transfer
from router.placement.snapshots.placement_snapshot import PlacementSnapshot


class UnreportedPlacements:
    """Placements that a worker's reports do not include yet, and their sums."""

    __slots__ = ("_taken", "blocks", "streams", "tokens")

    def __init__(self) -> None:
        self.streams = 0
        self.tokens = 0
        """Tokens still to be computed."""
        self.blocks = 0
        """Reserved blocks."""
        self._taken: dict[ActivePlacement, tuple[int, int, int]] = {}
        """Streams, tokens and blocks of each placement."""

    def __len__(self) -> int:
        return len(self._taken)

    def __contains__(self, placed: "ActivePlacement") -> bool:
        return placed in self._taken

    def add(self, placed: "ActivePlacement", streams: int = 0, tokens: int = 0, blocks: int = 0) -> None:
        self._taken[placed] = streams, tokens, blocks
        self._count(streams, tokens, blocks)

    def computed(self, placed: "ActivePlacement") -> None:
        """Count a placement's tokens as computed."""
        streams, tokens, blocks = self._taken[placed]
        self._taken[placed] = streams, 0, blocks
        self.tokens -= tokens

    def remove(self, placed: "ActivePlacement") -> None:
        """Remove a placement."""
        streams, tokens, blocks = self._taken.pop(placed)
        self._count(-streams, -tokens, -blocks)

    def see(self, sequence: int) -> None:
        """Drop all placements up to `sequence`, which a report includes."""
        for placed in [placed for placed in self._taken if placed.sequence <= sequence]:
            self.remove(placed)

    def _count(self, streams: int, tokens: int, blocks: int) -> None:
        self.streams += streams
        self.tokens += tokens
        self.blocks += blocks


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One membership, from Hello to the end of its stream."""

    hello: pb.Hello
    load: pb.LoadReport | None = None
    num_reports: int = 0
    """Number of load reports, unchanged ones included."""
    next_cache_sequence: int | None = None
    """Number of the next cache event; None until the first snapshot."""
    lost: bool = False
    """Whether its engine fell silent; calls to it are cancelled."""
    on_lost: set[Callable[[], object]] = field(default_factory=set)
    unreported_decodes: UnreportedPlacements = field(default_factory=UnreportedPlacements)
    """Placements on it that no report of its includes."""
    unreported_lends: UnreportedPlacements = field(default_factory=UnreportedPlacements)
    """Placements on it as a lender that no report includes, until their first token."""
    num_cached: int = 0
    """Blocks that it reported as held."""
    asked_blocks: int = 0
    """Prompt blocks that it should compute or lend, over successful streams."""
    hit_blocks: int = 0
    """Blocks among those that it held already."""
    draining: bool = False
    """Whether it is stopping: it accepts nothing, and its blocks can be read."""
    avoided: bool = False
    """Whether nothing starts there for a while, because placements failed."""
    failing: bool = False
    """Whether its circuit breaker is open or half-open."""
    stream_key: bytes = b""
    """Key of the connection that brings its events."""
    failing_lenders: "set[WorkerRecord]" = field(default_factory=set)
    """Lenders for which the circuit breaker of its loans is open or half-open."""
    server: str = ""
    """Abilities of a stock server, in words; empty for a worker of Tandem."""
    store_id: str = field(init=False, default="")
    """Row of the worker table for the store that it shares, by model and store; empty without one."""

    def __post_init__(self) -> None:
        if self.hello.store:
            which = blake2b(self.hello.model_fingerprint + self.hello.store.encode(), digest_size=4)
            self.store_id = f"shared-store/{which.hexdigest()}"

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    @property
    def decodes(self) -> bool:
        return self.hello.role == pb.ROLE_DECODE


@dataclass(slots=True, eq=False)
class ActivePlacement:
    """A placement in progress."""

    sequence: int
    decode: WorkerRecord
    lender: WorkerRecord | None
    lender_tokens: int
    own_tokens: int
    """Prompt tokens that the decode worker computes."""
    lender_computes: bool
    source: WorkerRecord | None
    demand: Demand
    keys: tuple[BlockKey, ...]
    predicted_ttft_s: float
    placement_snapshot: PlacementSnapshot | None
    """Snapshot of the decision, where these are kept; its keeper takes it from here."""
    running_before: int
    """Streams on the decode worker without this one."""
    queued_before: tuple[int, int]
    """Prompt tokens queued at the decode worker and at the lender, without this request's."""
    transfers: tuple[Transfer, ...] = ()
    """Its transfers, in flight until its first token."""
    started: bool = False
    """Whether the first token has come, so that caches have reported what it left in them."""
    failed: bool = False
    """Whether its decode worker failed."""
    lent: bool | None = None
    """Whether its lender lent; None when unknown or not needed."""

    def transfer_from(self, lender_id: str) -> Transfer | None:
        """Return its decode worker's transfer from this lender or store."""
        to_it = (each for each in self.transfers if each.borrower_id == self.decode.worker_id)
        return next((each for each in to_it if each.lender_id == lender_id), None)

    @property
    def num_streams(self) -> int:
        return max(1, len(self.demand.chain_tokens))
