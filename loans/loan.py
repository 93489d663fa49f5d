"""A loan taken: who wants it, its state machine, its source and its reads.

Account of where the KV of a request came from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from kvcache.block_keys import BlockKey
from kvcache.chain import BlockRange, Chain
from loans.borrower import Borrower
from loans.network import NO_MARK, Lender, PlacementMark
from loans.reads.block_reads import RankRead
from loans.sources import LoanSource


@dataclass(slots=True)
class KvAccount:
    """Origin of one request's KV, and the times of its stages in seconds of the host's monotonic clock."""

    reused_blocks: int = 0
    moved_blocks: int = 0
    computed_blocks: int = 0
    computed_tokens: int = 0
    moved_bytes: int = 0
    mismatched_blocks: int = 0
    lender_cached_blocks: int = 0
    lender_computed_blocks: int = 0
    lender_fetched_blocks: int = 0
    restored_blocks: int = 0
    """Blocks restored from the local store, in main memory or on a disk of this host."""
    store_blocks: int = 0
    """Blocks fetched from the store that workers share."""
    transport: str = ""
    lanes: tuple[str, ...] = ()
    hedged_blocks: int = 0
    """Blocks computed here because the lender was silent, while its loan was open."""
    loan_failure: str = ""
    restore_failure: str = ""
    """Reason why restoring from the local store ended early."""
    store_failure: str = ""
    """Reason why fetching from the shared store ended early."""
    pinned_blocks: int = 0
    """Blocks of the prompt that stay in the pool, as the request asked."""
    pins_gave_way: int = 0
    """Blocks of the prompt that an earlier request pinned and that gave way to other requests before their time."""
    stored_blocks: int = 0
    """Blocks of a request without output that the shared store has, or is being given."""
    preemptions: int = 0
    """Number of times the request was preempted and its tokens computed again."""
    recomputed_tokens: int = 0
    """Tokens computed again because they were no longer cached after a preemption; `computed_tokens` excludes them."""
    is_predicted: bool = False
    """Whether the counts are the router's prediction, because a stock server tells none."""
    times: dict[str, float] = field(default_factory=dict)

    def store_failed(self, is_local: bool, reason: str) -> None:
        """Record why reading from the local store, or from the shared one, ended early."""
        if is_local:
            self.restore_failure = reason
        else:
            self.store_failure = reason


C = TypeVar("C", bound=Chain)
C_contra = TypeVar("C_contra", bound=Chain, contravariant=True)


class LoanOwner(Protocol[C_contra]):
    """Owner of the sequence for which a loan is taken."""

    def loan_bound(self, sequence: C_contra, first: int) -> None:
        """Process blocks from `first` to the last named one, which arrived and were verified."""

    def loan_hedged(self, sequence: C_contra) -> bool:
        """Start to compute the sequence while its loan stays open, or return False: the loan ends instead."""

    def loan_over(self, sequence: C_contra, lost_blocks: bool) -> None:
        """Process the end of the loan; the sequence may be computed.

        With `lost_blocks` it may not: its chain has holes, and it can only be finished.
        """


@dataclass(slots=True)
class BorrowRequest(Generic[C]):
    """Request of a sequence for missing blocks."""

    sequence: C
    keys: Sequence[BlockKey]
    """Keys of the sequence's full blocks that may come from elsewhere."""
    block_range: BlockRange
    """Blocks up to the last one that may come from elsewhere, by position; the sequence holds its first ones."""
    lender: Lender | None
    account: KvAccount
    owner: LoanOwner[C]
    reads_store: bool = False
    """Whether the placement counts on blocks in the shared store."""
    mark: PlacementMark = NO_MARK
    """Placement that the lender's load reports return."""
    log_id: str = ""
    """The client's request id, for logs."""

    @property
    def missing(self) -> list[BlockKey]:
        """Names of the blocks that the sequence does not have yet."""
        return self.block_range.names[len(self.sequence.keys) :]


@dataclass(slots=True, eq=False)
class TakenLoan:
    """One loan: its state machine and its reads."""

    wanted: BorrowRequest[Any]
    machine: Borrower
    source: LoanSource
    block_reads: dict[int, dict[int, RankRead]] = field(default_factory=dict)
    """Reads in flight, by first chain index, then by rank."""
    quarantined: dict[int, "Quarantined"] = field(default_factory=dict)
    """Quarantined blocks, by first chain index, until their reads are quiet."""
    heard_at: float = 0.0
    """Time of the source's last announcement, on the engine's clock."""
    silent_s: float = 0.0
    """Silence of the lender, in seconds, after which blocks were first computed here; 0 when they never were."""

    @property
    def next_name(self) -> BlockKey:
        """Name of the first block that is not bound."""
        return self.wanted.block_range.names[self.machine.bound_end]


@dataclass(slots=True)
class Quarantined:
    blocks: list[int]
    writing: set[int]
    """Ranks that still write some of the blocks."""


@dataclass(frozen=True, slots=True)
class ReadCompletion:
    """All reads of a block read are quiet on one rank."""

    loan: TakenLoan
    first: int
    rank: int
    fingerprints: tuple[bytes, ...] | None
    peer_gone: bool = False


Post = Callable[[Callable[[], object]], None]
"""Function that has a call made by the engine's loop. From any thread."""
