"""A loan taken: who wants it, its state machine, its source and its reads."""

from dataclasses import dataclass, field
from typing import Protocol

from engine.core_types import EngineSequence
from engine.messages.from_engine import CacheInspected, KvAccount
from kvcache.block_keys import BlockKey
from kvcache.block_range import BlockRange
from kvcache.store.kv_store import Fetched
from loans.borrower import Borrower
from loans.reads.block_reads import RankRead
from loans.sources import LoanSource


class LoanOwner(Protocol):
    """Owner of the sequence for which a loan is taken."""

    def loan_bound(self, sequence: EngineSequence, first: int) -> None:
        """Process blocks from `first` to the last named one, which arrived and were verified."""

    def loan_hedged(self, sequence: EngineSequence) -> bool:
        """Start to compute the sequence while its loan stays open, or return False: the loan ends instead."""

    def loan_over(self, sequence: EngineSequence, lost_blocks: bool) -> None:
        """Process the end of the loan; the sequence may be computed.

        With `lost_blocks` it may not: its chain has holes, and it can only be finished.
        """


@dataclass(slots=True)
class BorrowRequest:
    """Request of a sequence for missing blocks."""

    sequence: EngineSequence
    block_range: BlockRange
    """Blocks up to the last one that may come from elsewhere, by position; the sequence holds its first ones."""
    lender_computes: bool | None
    """Whether the lender may compute blocks it lacks; None without a lender."""
    account: KvAccount
    owner: LoanOwner
    reads_store: bool = False
    """Whether the placement counts on blocks in the shared store."""

    @property
    def missing(self) -> list[BlockKey]:
        """Names of the blocks that the sequence does not have yet."""
        return self.block_range.names[len(self.sequence.keys) :]


@dataclass(slots=True, eq=False)
class TakenLoan:
    """One loan: its state machine and its reads."""

    wanted: BorrowRequest
    machine: Borrower
    source: LoanSource
    block_reads: dict[int, dict[int, RankRead]] = field(default_factory=dict)
    """Reads in flight, by first chain index, then by rank."""
    quarantined: dict[int, "Quarantined"] = field(default_factory=dict)
    """Quarantined blocks, by first chain index, until their reads are quiet."""
    heard_at: float = 0.0
    """Time of the lender's last announcement, by its front or by the fast path, on the engine's clock."""
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
    """Message from another thread: all reads of a block read are quiet on one rank."""

    loan: TakenLoan
    first: int
    rank: int
    fingerprints: tuple[bytes, ...] | None
    peer_gone: bool = False


@dataclass(frozen=True, slots=True)
class StoreFound:
    """Message from another thread: a store seems to hold the next `num_blocks` blocks."""

    loan: TakenLoan
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StoreFetched:
    """Message from another thread: a store's answer to the fetch of the blocks from `first` on."""

    loan: TakenLoan
    first: int
    fetched: Fetched


@dataclass(frozen=True, slots=True)
class StoreRemoved:
    """Message from another thread: objects of the shared store are removed, for which an answer waits."""

    inspected: CacheInspected
    num_objects: int
    failure: str
    """Why not all were removed; empty when all were."""


@dataclass(frozen=True, slots=True)
class ConnectionRead:
    """Message from another thread: a read that opens a connection is quiet on one rank."""

    query_id: int
    arrived: bool
    peer_gone: bool


Posted = ReadCompletion | ConnectionRead | StoreFound | StoreFetched | StoreRemoved
"""Messages that other threads post to the engine's loop."""
