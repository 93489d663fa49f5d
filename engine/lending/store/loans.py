"""Loans from the store that workers share: a lookup, fetches, and the end of a store that does not answer."""

from collections.abc import Callable, Iterable, Sequence

from engine.kv.kv_cache_manager import KVCacheManager
from engine.kv.kv_stats import STORE
from engine.kv.store.shared_store import Fetched
from engine.lending.borrower import Event, Failed, Shortened, Started
from engine.lending.loan import BorrowRequest, Loan, Posted, StoreFetched, StoreFound
from engine.lending.reads.block_reads import LocalRank, ReadProgress, RemoteRank
from engine.lending.sources import LoanSource
from engine.lending.store.source import StoreSource

STORE_SILENCE_S = 1.0
"""Shortest silence of the store, in seconds, after which a loan gives it up."""


class StoreLoans:
    """Loans from the store, beside those that `BorrowerManager` takes from tiers and lenders."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        own: LocalRank | None,
        others: Sequence[RemoteRank],
        post: Callable[[Posted], None],
        open_loan: Callable[[BorrowRequest, LoanSource, int, int, bool], Loan],
        handle: Callable[[Loan, Event], None],
        compute_s: Callable[[int], float],
    ) -> None:
        """Create them.

        `open_loan` makes a loan of a source for chain blocks [first, end), of which fewer may come; `handle` passes an
        event to a loan's machine. `compute_s` returns the seconds in which this engine would compute so many blocks.
        """
        self._kv_cache = kv_cache
        self._own, self._others = own, others
        self._post = post
        self._open_loan = open_loan
        self._handle = handle
        self._compute_s = compute_s
        self._copying = ReadProgress(kv_cache.clock)
        """Progress of copies from the store's memory into the pool."""

    def take(self, wanted: BorrowRequest) -> bool:
        """Ask the store for the missing blocks, if there is no lender and fetching seems faster than computing.

        A placement that counts on the store knows what it holds, and what reading from it costs.
        """
        store, first = self._kv_cache.store, len(wanted.sequence.keys)
        if store is not None and wanted.lender_computes is None:
            wanted.course = self._kv_cache.stored_course(wanted.sequence, wanted.course)
        missing = wanted.course.names[first:]
        if store is None or wanted.lender_computes is not None or not missing:
            return False
        if not store.answers or not (wanted.reads_store or self._seems_worth_it(len(missing))):
            return False
        source = StoreSource(store, missing, first, self._kv_cache.write_block, self._own, self._others, self._copying)
        loan = self._open_loan(wanted, source, first, len(wanted.course.names), True)
        self._kv_cache.counts.looked(STORE, len(missing), 0)
        wanted.account.times["fetch_started"] = loan.heard_at = self._kv_cache.clock()

        def found(num_blocks: int) -> None:
            self._post(StoreFound(loan, num_blocks))

        def fetched(first: int, what: Fetched) -> None:
            self._post(StoreFetched(loan, first, what))

        source.open(found, fetched)
        return True

    def found(self, message: StoreFound) -> None:
        """Fetch what the store holds of a loan's blocks, if that is faster than computing them."""
        loan = message.loan
        if loan.machine.done:
            return
        assert isinstance(loan.source, StoreSource)
        now = self._kv_cache.clock()
        wanted = loan.machine.end - loan.machine.first
        if not loan.wanted.reads_store:  # what the router knows to be there says nothing about other prompts
            self._kv_cache.lookups.looked(wanted, message.num_blocks, now - loan.heard_at)
        loan.heard_at = now
        is_worth_it = loan.wanted.reads_store or self._kv_cache.worth_fetching(message.num_blocks)
        if self._kv_cache.resumes_at_boundaries and message.num_blocks < wanted:
            is_worth_it = False  # nothing can go on before the boundary
        count = message.num_blocks if is_worth_it else 0
        self._handle(loan, Started(loan.machine.first + count))
        if not loan.machine.done:
            loan.source.start(count)

    def fetched(self, message: StoreFetched) -> None:
        """Announce blocks that the store brought, or end the loan before one that it lacks."""
        loan, source = message.loan, message.loan.source
        assert isinstance(source, StoreSource)
        loan.heard_at = self._kv_cache.clock()
        for announced in source.arrived(message.first, message.fetched):
            self._handle(loan, announced)
        if source.shortened is not None and not loan.machine.done:
            end, loan.wanted.account.store_failure = source.shortened
            self._handle(loan, Shortened(end))

    def _seems_worth_it(self, num_blocks: int) -> bool:
        kv_cache, num_tokens = self._kv_cache, num_blocks * self._kv_cache.layout.block_tokens
        return kv_cache.worth_fetching(num_blocks) and kv_cache.lookups.worth_looking(num_tokens, kv_cache.rates)

    def give_up(self, loans: Iterable[Loan], now: float) -> None:
        """End those of `loans` whose store has been silent for longer than computing the rest takes."""
        if (store := self._kv_cache.store) is None:
            return
        for loan in list(loans):
            if isinstance(loan.source, StoreSource) and not loan.block_reads:
                missing = loan.machine.end - loan.machine.bound_end
                silent_s = now - loan.heard_at
                if silent_s >= max(STORE_SILENCE_S, self._compute_s(missing)):
                    store.fell_silent()
                    self._handle(loan, Failed(f"the shared store was silent for {silent_s:.1f} s"))
