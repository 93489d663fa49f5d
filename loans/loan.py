"""A loan taken: who wants it, its state machine, its source and its reads.

A source of blocks is another worker's pool, or a store below this engine's own. The borrower's state machine is the
same for all. They differ in who reads, who is told of releases, and what happens to a block that arrived wrong.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcache.block_keys import BlockKey
from kvcache.chain import BlockRange, Chain
from loans.account import KvAccount
from loans.borrower import Borrower
from loans.network import NO_MARK, Lender, LoanNetwork, LoanTaken, PlacementMark, TakesLoan, Want
from loans.reads.block_reads import LocalRank, Rank, RankRead, ReadProgress, ReadRun, RemoteRank

RELEASE_BYTES = 32 << 20
"""Bytes that may be read before the lender is sent a release; a range out of order is sent at once."""
RankQuiet = Callable[[int, tuple[bytes, ...] | None, bool], None]
"""Callback like OnQuiet of `block_reads.py`, with the rank's number first."""
WriteBlock = Callable[[int, NDArray[np.uint8]], None]
"""Callable write_block(block, bytes) that writes what this process's pool has of a whole block. From any thread."""


class LoanSource(ABC):
    """Source of one loan.

    Block ids have the meaning of the source's announcements.
    """

    @abstractmethod
    def start_read(self, block_ids: Sequence[int], blocks: Sequence[int], on_quiet: RankQuiet) -> list[RankRead]:
        """Start reading the source's `block_ids` into the pool's `blocks`, on every rank; each rank reports its end."""

    def release(self, first: int, count: int) -> None:  # noqa: B027 - not every source needs releases
        """Process that chain blocks [first, first + count) were read."""

    def spoiled(self, key: BlockKey) -> None:  # noqa: B027 - a lender checks its own blocks
        """Process that a block could not be read, or differs from its announcement."""

    def gone(self) -> None:  # noqa: B027 - a store has no connection
        """Process that the holder of the blocks is gone."""

    @abstractmethod
    def close(self) -> None:
        """End the loan; no read follows."""


class LenderSource(LoanSource):
    """Another engine, whose KV memory the ranks of this engine read."""

    def __init__(self, loan_id: str, lender: Lender, ranks: Sequence[Rank], block_bytes: int) -> None:
        """Create the source.

        `ranks` are all of this engine; `block_bytes` is the size of a whole block.
        """
        self._loan_id = loan_id
        self.lender = lender
        self._ranks = ranks
        self._block_bytes = block_bytes
        self._endpoint = b""
        self._lanes: Callable[[], tuple[str, ...]] = tuple
        self._unreleased: tuple[int, int] | None = None
        """First block and count of the blocks read since the last release."""
        self.cached_end = 0
        """Chain index below which blocks were cached at the lender."""
        self.fetched_end = 0
        """Chain index below which announced blocks, from `cached_end` on, came to the lender from elsewhere."""
        self.channel: LoanTaken

    def open(self, network: LoanNetwork, want: Want, takes: TakesLoan) -> None:
        self.channel = network.open(self.lender.peer, want, takes)

    def connect(self, endpoint: bytes) -> None:
        """Connect to the lender, which has started.

        Raises TransferError.
        """
        self._lanes = self._ranks[0].lanes_to(endpoint)
        self._endpoint = endpoint

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes of rank 0; those of other ranks are of the same kind."""
        return self._lanes()

    def start_read(self, block_ids: Sequence[int], blocks: Sequence[int], on_quiet: RankQuiet) -> list[RankRead]:
        assert self._endpoint
        return [
            rank.start_read(self._endpoint, block_ids, blocks, self._loan_id, partial(on_quiet, number))
            for number, rank in enumerate(self._ranks)
        ]

    def release(self, first: int, count: int) -> None:
        """Send releases in large ranges, since each is a message; the end of the loan releases the rest."""
        if self._unreleased and first == self._unreleased[0] + self._unreleased[1]:
            first, count = self._unreleased[0], self._unreleased[1] + count
        elif self._unreleased:
            self.channel.release(*self._unreleased)
        self._unreleased = first, count
        if count * self._block_bytes >= RELEASE_BYTES:
            self.channel.release(first, count)
            self._unreleased = None

    def gone(self) -> None:
        for rank in self._ranks:
            rank.drop(self._endpoint)

    def close(self) -> None:
        self.channel.close()


class RankCopies:
    """Copies of whole blocks, which this process holds, into the parts of all ranks."""

    def __init__(self, own: LocalRank | None, others: Sequence[RemoteRank], progress: ReadProgress) -> None:
        """Create them.

        `own` is this process's rank, if it has one; `progress` covers its copies.
        """
        self._own, self._others, self._progress = own, others, progress

    def start(
        self,
        read: ReadRun,
        content: Callable[[int], NDArray[np.uint8]],
        block_ids: Sequence[int],
        blocks: Sequence[int],
        on_quiet: RankQuiet,
    ) -> list[RankRead]:
        """Start copying `block_ids` into `blocks`.

        `read` copies into this process's part. The other ranks copy the `content` of each block by themselves.
        """
        started: list[RankRead] = []
        if self._own is not None:
            started.append(self._own.follow(read, block_ids, blocks, partial(on_quiet, 0), [self._progress]))
        contents = [content(index) for index in block_ids]
        for number, rank in enumerate(self._others, len(started)):
            started.append(rank.start_copy(contents, blocks, partial(on_quiet, number)))
        return started


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
