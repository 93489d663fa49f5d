"""Where a loan's blocks come from: another worker's pool, or this engine's own tiers below its pool.

The borrower machine is the same for both. What differs is who reads, who is told of releases, and what is done about
a block that arrived wrong.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.kv.block_keys import BlockKey
from engine.kv.tiers.tier_jobs import Held
from engine.kv.tiers.tiers import Tiers
from engine.lending.block_reads import LocalRank, Peers, Rank, RankRead, ReadProgress, lanes_of
from engine.lending.fast_path import Word
from engine.messages import CloseLoan, FromEngine, OpenLoan, ReleaseLoan

RELEASE_BYTES = 32 << 20
"""So much, and a range out of order, may be read before the lender is told."""
RankQuiet = Callable[[int, tuple[bytes, ...] | None, bool], None]
"""As OnQuiet of `block_reads.py`, with the rank's number before it."""
WriteBlock = Callable[[int, NDArray[np.uint8]], None]
"""write_block(block, its bytes): into the pool. Called on any thread."""


class LoanSource(ABC):
    """Of one loan. Block ids mean what the source's announcements mean by them."""

    @abstractmethod
    def start_read(self, block_ids: Sequence[int], blocks: Sequence[int], on_quiet: RankQuiet) -> list[RankRead]:
        """Read the source's `block_ids` into the pool's `blocks`, on every rank; each says when it is done."""

    def release(self, first: int, count: int) -> None:  # noqa: B027 - not every source is told
        """Chain blocks [first, first + count) have been read."""

    def spoiled(self, key: BlockKey) -> None:  # noqa: B027 - a lender's blocks are its own affair
        """This block could not be read, or is not what was announced."""

    def gone(self) -> None:  # noqa: B027 - as above
        """Whoever held the blocks is no longer there."""

    @abstractmethod
    def close(self) -> None:
        """The loan is over; nothing more is read."""


class LenderSource(LoanSource):
    """Another worker, reached by the front's Lend stream and read by the ranks of this engine."""

    def __init__(
        self,
        loan_id: str,
        may_compute: bool,
        own: LocalRank,
        others: Sequence[Rank],
        block_bytes: int,
        emit: Callable[[FromEngine], None],
    ) -> None:
        """`others`: ranks 1 and on, where there are any. `block_bytes`: of a whole block."""
        self._loan_id = loan_id
        self._own = own
        self._ranks: list[Rank] = [own, *others]
        self._block_bytes = block_bytes
        self._emit = emit
        self._endpoint = b""
        self._peers: Peers = []
        self._unreleased: tuple[int, int] | None = None
        """First block and count of what has been read since the last ReleaseLoan."""
        self.may_compute = may_compute
        self.cached_end = 0
        """Chain blocks below it were cached at the lender."""
        self.fetched_end = 0
        """Announced chain blocks below it, and not below `cached_end`, the lender itself had from elsewhere."""
        self.fast_path: deque[Word] = deque()
        """What was said early, and not by the lease yet."""

    def open(self, first: int, end: int, fast_path: bytes) -> None:
        self._emit(OpenLoan(self._loan_id, first, end, self.may_compute, fast_path))

    def connect(self, endpoint: bytes) -> None:
        """The lender has started. Raises TransferError."""
        self._peers = self._own.connect(endpoint)
        self._endpoint = endpoint

    @property
    def lanes(self) -> tuple[str, ...]:
        """Of rank 0; the others' are of the same kind."""
        return lanes_of(self._peers)

    def start_read(self, block_ids: Sequence[int], blocks: Sequence[int], on_quiet: RankQuiet) -> list[RankRead]:
        assert self._endpoint
        return [
            rank.start_read(self._endpoint, block_ids, blocks, self._loan_id, partial(on_quiet, number))
            for number, rank in enumerate(self._ranks)
        ]

    def release(self, first: int, count: int) -> None:
        """Said in large ranges: each is a message, and the end of the loan releases the rest."""
        if self._unreleased and first == self._unreleased[0] + self._unreleased[1]:
            first, count = self._unreleased[0], self._unreleased[1] + count
        elif self._unreleased:
            self._emit(ReleaseLoan(self._loan_id, *self._unreleased))
        self._unreleased = first, count
        if count * self._block_bytes >= RELEASE_BYTES:
            self._emit(ReleaseLoan(self._loan_id, first, count))
            self._unreleased = None

    def gone(self) -> None:
        for rank in self._ranks:
            rank.drop(self._endpoint)

    def close(self) -> None:
        self._emit(CloseLoan(self._loan_id))


class TierSource(LoanSource):
    """Blocks that this engine's pool evicted. Block ids are places in the run that the loan is of. Of an engine of one
    rank: what a tier holds are whole blocks."""

    def __init__(
        self, tiers: Tiers, keys: Sequence[BlockKey], write_block: WriteBlock, own: LocalRank, progress: ReadProgress
    ) -> None:
        """`keys` are held by the tiers, and stay there until `close`. `progress`: of all reads of these tiers."""
        self._tiers = tiers
        self._held: list[Held] = tiers.pin(keys)
        self._write_block = write_block
        self._own = own
        self._progress = progress

    def num_held(self, tier: str) -> int:
        """Of its blocks, those that are read from there."""
        return sum(item.tier == tier for item in self._held)

    def fingerprints(self) -> tuple[bytes, ...]:
        return self._tiers.fingerprints(self._held)

    def start_read(self, block_ids: Sequence[int], blocks: Sequence[int], on_quiet: RankQuiet) -> list[RankRead]:
        def read(block_ids: Sequence[int], blocks: Sequence[int]) -> list[Future[None]]:
            return [self._read(block_ids, blocks)]

        return [self._own.follow(read, block_ids, blocks, partial(on_quiet, 0), [self._progress])]

    def _read(self, block_ids: Sequence[int], blocks: Sequence[int]) -> "Future[None]":
        def write(index: int, content: NDArray[np.uint8]) -> None:
            self._write_block(blocks[index], content)

        reading = self._tiers.read([self._held[place] for place in block_ids], write)
        self._progress.follow(reading)
        return reading

    def spoiled(self, key: BlockKey) -> None:
        self._tiers.forget([key])

    def close(self) -> None:
        self._tiers.unpin(self._held)
        self._held = []
