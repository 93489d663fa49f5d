"""A store below the pool as the source of a loan.

    find ──▶ Started ──fetch, FETCHES_AHEAD at once──▶ Announced ──copy into the pool──▶ ReadCompleted ──▶ next fetch

A fetch brings objects into memory of the store, where their headers are checked. Its blocks are announced in order with
the stored fingerprints, and then copied into the pool, where the loan compares them as it compares all others. So a
store that hangs never keeps blocks of the pool.

Loans from the stores below the pool: a lookup, fetches, and the end of a store that does not answer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.block_keys import BlockKey
from kvcache.cached_blocks import StoreBelow
from kvcache.kv_stats import LOCAL, STORE
from kvcache.kv_view import KvView
from kvcache.store.kv_store import Fetched
from loans.borrower import Announced, Event, Failed, Shortened, Started
from loans.loan import BorrowRequest, LoanSource, Post, RankCopies, RankQuiet, TakenLoan, WriteBlock
from loans.reads.block_reads import LocalRank, RankRead, ReadProgress, RemoteRank

FETCHES_AHEAD = 3


class StoreSource(LoanSource):
    """Blocks of a store.

    Objects are whole blocks. The engine process fetches them, and each rank copies its part out of them. Block ids are
    indices into the run of blocks that the loan is for.
    """

    def __init__(
        self,
        below: StoreBelow,
        keys: Sequence[BlockKey],
        first: int,
        write_block: WriteBlock,
        own: LocalRank | None,
        others: Sequence[RemoteRank],
        progress: ReadProgress,
    ) -> None:
        """Create the source of chain blocks from `first` on, named `keys`; `progress` covers all copies."""
        self.below = below
        self.is_local = below.store.is_local
        self.name = "the local store" if self.is_local else "the shared store"
        self.store = below.store
        self.keys = keys
        self._first = first
        self._write_block = write_block
        self._copies = RankCopies(own, others, progress)
        self._progress = progress
        self._on_fetched: Callable[[int, Fetched], object] = lambda first, fetched: None
        self._end = 0
        self._next_fetch = self._next_announced = 0
        self._fetched: dict[int, Fetched] = {}
        """Fetches that arrived and are not given back, by their first block."""
        self._unread: dict[int, int] = {}
        """Announced blocks that are not in the pool yet, by the first block of their fetch."""
        self._closed = False
        self.shortened: tuple[int, str] | None = None
        """Chain index from which the store has nothing, and why; None while it has all."""

    def open(self, on_fetched: Callable[[int, Fetched], object]) -> None:
        """Begin; the callback comes on any thread, with the first chain index of each fetch."""
        self._on_fetched = on_fetched

    def look_up(self, on_found: Callable[[int], object]) -> None:
        """Ask the store how many leading blocks it has; the callback comes on any thread."""
        self.store.find(self.keys, on_found)

    def start(self, num_blocks: int) -> None:
        """Fetch the first `num_blocks`."""
        self._end = num_blocks
        self._fetch_ahead()

    def arrived(self, first: int, fetched: Fetched) -> Iterator[Announced]:
        """Take a fetch in; yield what to announce next, in order."""
        if self._closed:
            self.store.give_back(fetched)
            return
        self._fetched[first - self._first] = fetched
        while (batch := self._fetched.get(self._next_announced)) is not None and self.shortened is None:
            at, count = self._next_announced, len(batch.contents)
            self._next_announced = min(at + self.store.blocks_per_fetch, self._end)
            if batch.failure:
                self.shortened = self._first + at + count, batch.failure
            if count:
                self._unread[at] = count
                yield Announced(self._first + at, tuple(range(at, at + count)), batch.fingerprints)

    def start_read(self, block_ids: Sequence[int], blocks: Sequence[int], on_quiet: RankQuiet) -> list[RankRead]:
        def read(block_ids: Sequence[int], blocks: Sequence[int]) -> "list[Future[None]]":
            contents = [self._content(index) for index in block_ids]
            copying = self.store.run(partial(_copy, self._write_block, blocks, contents))
            self._progress.follow(copying)
            return [copying]

        return self._copies.start(read, self._content, block_ids, blocks, on_quiet)

    def release(self, first: int, count: int) -> None:
        """Give fetches back whose blocks are all in the pool, and fetch what follows."""
        for index in range(first - self._first, first - self._first + count):
            at = self._fetch_of(index)
            self._unread[at] -= 1
            if not self._unread[at]:
                del self._unread[at]
                self.store.give_back(self._fetched.pop(at))
        self._fetch_ahead()

    def spoiled(self, key: BlockKey) -> None:
        self.store.refuse(key)

    def close(self) -> None:
        self._closed = True
        fetched, self._fetched = self._fetched, {}
        for each in fetched.values():
            self.store.give_back(each)

    def _fetch_ahead(self) -> None:
        width = self.store.blocks_per_fetch
        while self._next_fetch < min(self._end, self._next_announced + FETCHES_AHEAD * width):
            at = self._next_fetch
            self._next_fetch = min(at + width, self._end)
            on_fetched = partial(self._on_fetched, self._first + at)
            self.store.fetch(self.keys[at : self._next_fetch], on_fetched)

    def _fetch_of(self, index: int) -> int:
        """Return the first block of the fetch with block `index`."""
        return index - index % self.store.blocks_per_fetch

    def _content(self, index: int) -> NDArray[np.uint8]:
        at = self._fetch_of(index)
        return self._fetched[at].contents[index - at]


def _copy(write_block: WriteBlock, blocks: Sequence[int], contents: Sequence[NDArray[np.uint8]]) -> None:
    for block, content in zip(blocks, contents, strict=True):
        write_block(block, content)


STORE_SILENCE_S = 1.0
"""Shortest silence of a store, in seconds, after which a loan gives it up."""


class StoreLoans:
    """Loans from the stores, beside those that `BorrowerManager` takes from lenders."""

    def __init__(
        self,
        kv_cache: KvView,
        own: LocalRank | None,
        others: Sequence[RemoteRank],
        post: Post,
        open_loan: Callable[[BorrowRequest[Any], LoanSource, int, int, bool], TakenLoan],
        handle: Callable[[TakenLoan, Event], None],
        compute_s: Callable[[int], float],
    ) -> None:
        """Create them.

        `open_loan` makes a loan of a source for chain blocks [first, end), of which fewer may come; `handle` passes an
        event to a loan's machine. `compute_s` returns the seconds in which this engine would compute so many blocks.
        """
        self._kv_cache = kv_cache
        self._cached = kv_cache.cached
        self._own, self._others = own, others
        self._post = post
        self._open_loan = open_loan
        self._handle = handle
        self._compute_s = compute_s
        self._copying = ReadProgress(self._cached.clock)
        """Progress of copies from a store's memory into the pool."""

    def take_local(self, wanted: BorrowRequest[Any]) -> bool:
        """Ask the local store for the missing blocks.

        What it is known to have is fetched at once, if that seems faster than computing. What other workers may have
        written there is looked up first.
        """
        if (below := self._cached.local) is None or not wanted.missing:
            return False
        if wanted.lender is None:  # a lender's loan would have to begin where this one ends
            wanted.block_range = self._kv_cache.stored_range(wanted.sequence, wanted.block_range, below)
        missing = wanted.missing
        count = below.store.num_known(missing)
        if count and self._is_usable(count, len(missing)) and self._cached.worth_restoring(below, count):
            self._start(self._open(wanted, below, len(missing)), count)
            return True
        if below.store.has_other_writers and below.store.answers and self._seems_worth_it(below, len(missing)):
            self._look_up(wanted, below)
            return True
        self._cached.counts.looked(LOCAL, len(missing), 0)
        return False

    def take_shared(self, wanted: BorrowRequest[Any]) -> bool:
        """Ask the shared store for the missing blocks, if there is no lender and fetching seems faster than computing.

        A placement that counts on the store knows what it holds, and what reading from it costs.
        """
        if (below := self._cached.shared) is None or wanted.lender is not None:
            return False
        wanted.block_range = self._kv_cache.stored_range(wanted.sequence, wanted.block_range, below)
        if not (missing := wanted.missing) or not below.store.answers:
            return False
        if not (wanted.reads_store or self._seems_worth_it(below, len(missing))):
            return False
        self._look_up(wanted, below)
        return True

    def _found(self, loan: TakenLoan, num_blocks: int) -> None:
        """Fetch what a store seems to hold of a loan's next blocks, if that is faster than computing them."""
        if loan.machine.done:
            return
        assert isinstance(loan.source, StoreSource)
        below, now = loan.source.below, self._cached.clock()
        wanted = loan.machine.end - loan.machine.first
        if not loan.wanted.reads_store:  # what the router knows to be there says nothing about other prompts
            below.lookups.looked(wanted, num_blocks, now - loan.heard_at)
        loan.heard_at = now
        is_worth_it = loan.wanted.reads_store or self._cached.worth_restoring(below, num_blocks)
        is_usable = self._is_usable(num_blocks, wanted)
        self._start(loan, num_blocks if is_worth_it and is_usable else 0)

    def _fetched(self, loan: TakenLoan, first: int, fetched: Fetched) -> None:
        """Announce the blocks from `first` on that a store brought, or end the loan before one that it lacks."""
        source = loan.source
        assert isinstance(source, StoreSource)
        loan.heard_at = self._cached.clock()
        for announced in source.arrived(first, fetched):
            self._handle(loan, announced)
        if source.shortened is not None and not loan.machine.done:
            end, failure = source.shortened
            loan.wanted.account.store_failed(source.is_local, failure)
            self._handle(loan, Shortened(end))

    def give_up(self, loans: Iterable[TakenLoan], now: float) -> None:
        """End those of `loans` whose store has been silent for longer than computing the rest takes."""
        for loan in list(loans):
            if isinstance(loan.source, StoreSource) and not loan.block_reads:
                missing = loan.machine.end - loan.machine.bound_end
                silent_s = now - loan.heard_at
                if silent_s >= max(STORE_SILENCE_S, self._compute_s(missing)):
                    loan.source.below.store.fell_silent()
                    self._handle(loan, Failed(f"{loan.source.name} was silent for {silent_s:.1f} s"))

    def closed(self, loan: TakenLoan) -> None:
        """Learn a store's speed from a loan that is over."""
        source, account, now = loan.source, loan.wanted.account, self._cached.clock()
        assert isinstance(source, StoreSource)
        began, ended = ("restore_started", "restored") if source.is_local else ("fetch_started", "fetched")
        account.times[ended] = now
        num_blocks = account.restored_blocks if source.is_local else account.store_blocks
        source.below.speeds.restored(num_blocks * self._cached.layout.block_bytes, now - account.times[began])

    def _open(self, wanted: BorrowRequest[Any], below: StoreBelow, num_missing: int) -> TakenLoan:
        first = len(wanted.sequence.keys)
        write_block = self._cached.write_block
        source = StoreSource(below, wanted.missing, first, write_block, self._own, self._others, self._copying)
        loan = self._open_loan(wanted, source, first, first + num_missing, True)
        self._cached.counts.looked(LOCAL if source.is_local else STORE, num_missing, 0)
        began = "restore_started" if source.is_local else "fetch_started"
        wanted.account.times[began] = loan.heard_at = self._cached.clock()

        def fetched(first: int, what: Fetched) -> None:
            self._post(partial(self._fetched, loan, first, what))

        source.open(fetched)
        return loan

    def _look_up(self, wanted: BorrowRequest[Any], below: StoreBelow) -> None:
        loan = self._open(wanted, below, len(wanted.missing))
        assert isinstance(loan.source, StoreSource)
        loan.source.look_up(lambda num_blocks: self._post(partial(self._found, loan, num_blocks)))

    def _start(self, loan: TakenLoan, count: int) -> None:
        self._handle(loan, Started(loan.machine.first + count))
        if not loan.machine.done:
            assert isinstance(loan.source, StoreSource)
            loan.source.start(count)

    def _is_usable(self, num_found: int, num_wanted: int) -> bool:
        """Return whether a request could go on after a leading part of the blocks that it wants."""
        return num_found >= num_wanted or not self._kv_cache.resumes_at_boundaries

    def _seems_worth_it(self, below: StoreBelow, num_blocks: int) -> bool:
        num_tokens = num_blocks * self._cached.layout.block_tokens
        is_faster = self._cached.worth_restoring(below, num_blocks)
        return is_faster and below.lookups.worth_looking(num_tokens, self._cached.speeds)
