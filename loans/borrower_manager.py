"""The loans that this engine takes, from stores and from other workers: performs the borrowers' actions.

A sequence that lacks blocks asks its sources in order: first the local store, for the blocks of the chain that it has
next, then a lender, for the blocks still missing; without a lender, the store that workers share. Each source is one
loan with a state machine of its own. The sequence may be computed when the last loan is over, however much the loans
brought.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.logs import of
from kvcache.chain import Chain
from kvcache.items import begun_items
from kvcache.kv_stats import LOCAL, REMOTE, STORE
from kvcache.kv_view import KvView
from kvtransfer.errors import TransferError
from kvtransfer.ranks import RankGrid
from loans.borrower import (
    NONE_HELD,
    Abandon,
    Allocate,
    Announced,
    Bind,
    Borrower,
    Cancelled,
    Claimed,
    Close,
    ComputedHere,
    Event,
    Failed,
    Read,
    ReadCompleted,
    Release,
    Started,
)
from loans.loan import BorrowRequest, LenderSource, LoanSource, Post, Quarantined, ReadCompletion, TakenLoan
from loans.network import Blocks, Lender, Lent, LoanNetwork, Want
from loans.network import Started as LoanStarted
from loans.reads.block_reads import LocalRank, Rank, RemoteRank
from loans.store import StoreLoans, StoreSource

log = logging.getLogger(__name__)
BLOCK_READ_BYTES = 64 << 20
"""Largest part of an announcement read as one block read. The loop is woken once per block read, and if the lender dies
in the middle, the whole block read is lost."""
HEDGE_AFTER_S = 0.3
"""Shortest silence of a lender, in seconds, after which a borrower computes blocks itself. Engines send a heartbeat at
least every 0.15 s, also during long steps."""
HEDGE_UNMEASURED_S = 1.0
"""The same for an engine that has computed no prompt yet, and so does not know its speed."""
LOOKS_PER_SILENCE = 20
"""Checks for reads without progress, per `read_silence_s`."""
LOOK_EVERY_S = 0.05
"""Seconds between looks at lenders that are silent."""


class BorrowerManager:
    """Loans by the id of the request, or of the loan given, that needs them; at most one at a time for each."""

    def __init__(
        self,
        kv_cache: KvView,
        transport_name: str,
        network: LoanNetwork,
        post: Post,
        own: LocalRank | None,
        others: Sequence[RemoteRank] = (),
        read_silence_s: float = math.inf,
        grid: RankGrid | None = None,
    ) -> None:
        """Create the manager.

        `own` and `others` are the ranks of this engine: that of this process, if it has one, and the rest.
        `grid` tells which part of a block each of them holds; None: each has some heads.

        Loans whose reads make no progress for `read_silence_s` fail.
        """
        self._kv_cache = kv_cache
        self._cached = kv_cache.cached
        self._transport_name = transport_name
        self._network = network
        self._post = post
        self._own, self._others = own, others
        self._ranks: list[Rank] = [*([own] if own is not None else []), *others]
        self._grid = grid or RankGrid(len(self._ranks))
        self._read_silence_s = read_silence_s
        self.hedge_unmeasured_s = HEDGE_UNMEASURED_S
        """Silence of a lender, in seconds, that ends a loan while this engine's own speed is not known."""
        self._looked_at = self._looked_for_silence_at = -math.inf
        self.store = StoreLoans(kv_cache, own, others, post, self._open, self._handle, self._hedge_after_s)
        """Loans from the stores below the pool."""
        self.loans: dict[str, TakenLoan] = {}
        """Loans that are not over."""
        self._blocks_per_read = max(1, BLOCK_READ_BYTES // self._cached.layout.block_bytes)

    @property
    def num_loans(self) -> int:
        return len(self.loans)

    @property
    def waits_for_room(self) -> bool:
        """Whether some lender has not started yet, perhaps for lack of capacity.

        A lender that computes nothing never waits.
        """
        return any(
            loan.machine.opening and isinstance(loan.source, LenderSource) and loan.source.lender.may_compute
            for loan in self.loans.values()
        )

    def take(self, wanted: BorrowRequest[Any]) -> bool:
        """Ask for the blocks that the sequence lacks.

        Returns False without a source; else the owner is told the end.
        """
        loan_id = wanted.sequence.request_id
        assert loan_id not in self.loans
        return self.store.take_local(wanted) or self._take_from_others(wanted)

    def lent(self, loan: TakenLoan, message: Lent) -> None:
        """Process a message of a loan's lender."""
        if loan.machine.done:
            return
        source = loan.source
        assert isinstance(source, LenderSource)
        if isinstance(message, Blocks):
            self._announce(loan, source, message)
        else:
            self._start(loan, source, message)

    def ended(self, loan: TakenLoan, reason: str) -> None:
        """Process that a loan's lender, or the way to it, ended the loan."""
        if not loan.machine.done:
            log.info("loan of %s failed: %s", loan.wanted.sequence.request_id, reason, extra=of(loan.wanted.log_id))
            self._handle(loan, Failed(reason))

    def _start(self, loan: TakenLoan, source: LenderSource, message: LoanStarted) -> None:
        times = loan.wanted.account.times
        times["loan_started"] = loan.heard_at = self._cached.clock()
        times["lender_queued_s"] = message.queued_ms / 1e3
        source.cached_end = source.fetched_end = message.cached_end_block
        block_range, end = loan.wanted.block_range, message.end_block
        if not loan.machine.opening or not block_range.first <= end <= block_range.end:
            self._handle(loan, Failed(f"protocol error: Started with end_block {end}"))
            return
        if end < block_range.end:
            block_range = loan.wanted.block_range = self._kv_cache.cut(loan.wanted.sequence, block_range, end)
        try:
            source.connect(source.channel.endpoint)
        except TransferError as error:
            self._handle(loan, Failed(str(error)))
            return
        self._handle(loan, Started(len(block_range.names)))

    def _announce(self, loan: TakenLoan, source: LenderSource, message: Blocks) -> None:
        times = loan.wanted.account.times
        times["last_blocks_ready"] = loan.heard_at = self._cached.clock()
        times.setdefault("first_blocks_ready", loan.heard_at)
        if message.fetched:
            source.fetched_end = message.first + len(message.block_ids)
        self._handle(loan, Announced(message.first, message.block_ids, self._split(message.fingerprints)))

    def look_for_silence(self) -> None:
        """Compute missing blocks here where a lender has been silent for longer than that takes.

        Blocks that arrive later are still used, as far as they are ahead. A loan whose reads hang is over.
        """
        for loan in list(self.loans.values()):
            source, machine, sequence = loan.source, loan.machine, loan.wanted.sequence
            if not isinstance(source, LenderSource):
                continue
            silent_s = source.channel.quiet_s
            if silent_s < self._hedge_after_s(machine.end - machine.bound_end):
                continue
            loan.silent_s = loan.silent_s or silent_s
            if machine.hold_at is not None:
                self._handle(loan, Failed("its reads hang"))
            elif not sequence.hedged and not loan.wanted.owner.loan_hedged(sequence):
                self._handle(loan, Failed("its blocks are computed here"))

    def claim(self, sequence: Chain, num_tokens: int) -> None:
        """Take the blocks of the sequence's first `num_tokens` from its hedged loan: a step computes them."""
        loan = self.loans[sequence.request_id]
        end = self._cached.layout.blocks_for(num_tokens)
        loan.wanted.account.hedged_blocks += max(0, min(end, loan.machine.end) - loan.machine.claimed_end)
        self._handle(loan, Claimed(end))

    def computed(self, sequence: Chain) -> None:
        """Bind blocks of the sequence's hedged loan that follow those it has computed by now."""
        self._handle(self.loans[sequence.request_id], ComputedHere(len(sequence.keys)))

    def _hedge_after_s(self, num_blocks: int) -> float:
        """Return the seconds in which this engine would compute `num_blocks`, by its measured speed."""
        speed = self._cached.speeds.prefill_tokens_per_s
        if speed is None:
            return self.hedge_unmeasured_s
        return max(HEDGE_AFTER_S, num_blocks * self._cached.layout.block_tokens / speed)

    def cancel(self, loan_id: str) -> None:
        """Cancel a loan.

        Afterwards its sequence holds no block that may still be written.
        """
        if (loan := self.loans.get(loan_id)) is not None:
            self._handle(loan, Cancelled())

    def _read_completed(self, message: ReadCompletion) -> None:
        loan = message.loan
        if isinstance(loan.source, LenderSource):
            self._cached.counts.read_ends(self._cached.clock())
        if message.peer_gone:
            loan.source.gone()
        if (quarantined := loan.quarantined.get(message.first)) is not None:
            quarantined.writing.discard(message.rank)
            if not quarantined.writing:
                del loan.quarantined[message.first]
                self._cached.pool.unquarantine(quarantined.blocks)
        elif (block_read := loan.block_reads.get(message.first)) is not None:
            del block_read[message.rank]
            if not block_read:
                del loan.block_reads[message.first]
            self._handle(loan, ReadCompleted(message.first, message.fingerprints, message.rank))

    def give_up_stuck(self) -> None:
        """End loans whose source is silent or whose reads make no progress although their lender sends heartbeats.

        The network path or one rank of the lender is broken then. Posted reads stay quarantined.
        """
        now = self._cached.clock()
        if not self.loans:
            return
        self.store.give_up(self.loans.values(), now)
        if now - self._looked_for_silence_at >= LOOK_EVERY_S:
            self._looked_for_silence_at = now
            self.look_for_silence()
        if now - self._looked_at < self._read_silence_s / LOOKS_PER_SILENCE:
            return
        self._looked_at = now
        for loan in list(self.loans.values()):
            block_reads = [each for ranks in loan.block_reads.values() for each in ranks.values()]
            if max((each.stuck_s() for each in block_reads), default=0.0) >= self._read_silence_s:
                self._handle(loan, Failed(f"no read has ended for {self._read_silence_s:g} s"))

    # ------------------------------------------------------------------ the sources in turn

    def _borrow(self, wanted: BorrowRequest[Any]) -> bool:
        """Borrow from the lender, if there is one and blocks are missing."""
        sequence, lender = wanted.sequence, wanted.lender
        if lender is None or not wanted.missing:
            return False
        wanted.block_range = self._kv_cache.range_of(sequence, wanted.keys)  # the local store may have brought some
        first, end = len(sequence.keys), len(wanted.block_range.names)
        if first != wanted.block_range.start:
            return False  # the local store broke between two boundaries, and a lender begins at one
        source = LenderSource(sequence.request_id, lender, self._ranks, self._cached.layout.block_bytes)
        loan = self._open(wanted, source, first, end, may_be_part=not lender.may_compute)
        self._cached.counts.looked(REMOTE, end - first, 0)
        wanted.account.times["loan_opened"] = self._cached.clock()
        source.open(self._network, self._want(wanted, lender), _Taker(self, loan))
        return True

    def _want(self, wanted: BorrowRequest[Any], lender: Lender) -> Want:
        """Return what the lender is asked for."""
        sequence, end = wanted.sequence, wanted.block_range.end
        num_tokens = end * self._cached.layout.block_tokens
        items = begun_items(sequence.items, num_tokens)
        # Draft layers read the token after the last one, and the lender computes with whole items.
        num_sent = max(num_tokens + 1, items[-1].end if items else 0)
        tokens = sequence.token_ids[:num_sent]
        return Want(
            request_id=wanted.log_id,
            keys=wanted.keys[:end],
            first_block=wanted.block_range.first,
            may_compute=lender.may_compute,
            token_ids=[*tokens, *sequence.tail[: num_sent - len(tokens)]],
            root=sequence.root,
            priority=sequence.priority,
            adapter=sequence.adapter,
            mark=wanted.mark,
            source=lender.source if lender.may_compute else None,
            reads_store=lender.reads_store and lender.may_compute,
            items=items,
        )

    def _open(
        self, wanted: BorrowRequest[Any], source: LoanSource, first: int, end: int, may_be_part: bool = False
    ) -> TakenLoan:
        self._kv_cache.wait_for_loan(wanted.sequence)
        machine = Borrower(first, end, self._blocks_per_read, may_be_part, self._grid)
        loan = self.loans[wanted.sequence.request_id] = TakenLoan(wanted, machine, source)
        return loan

    # ------------------------------------------------------------------ what a machine says

    def _handle(self, loan: TakenLoan, event: Event) -> None:
        sequence, lost_blocks = loan.wanted.sequence, False
        for action in loan.machine.handle(event):
            match action:
                case Allocate(_, end):
                    self._kv_cache.grow_to(sequence, end)
                case Read(first, block_ids):
                    self._read(loan, first, block_ids)
                case Bind(first, end, fingerprints):
                    self._kv_cache.bind(sequence, loan.wanted.block_range.names[first:end], fingerprints)
                    self._count(loan, first, end)
                    loan.wanted.owner.loan_bound(sequence, first)
                case Release(first, count):
                    loan.source.release(first, count)
                case Abandon():
                    lost_blocks = not self._abandon(loan, needed=not isinstance(event, Cancelled))
                case Close(_, mismatched, failure):
                    self._close(loan, mismatched, failure, lost_blocks, isinstance(event, Cancelled))
        if sequence.hedged:
            hold = loan.machine.hold_at if not loan.machine.done else None
            sequence.held_at = None if hold is None else hold * self._cached.layout.block_tokens

    def _read(self, loan: TakenLoan, first: int, block_ids: tuple[int, ...]) -> None:
        blocks = loan.wanted.sequence.blocks[first : first + len(block_ids)]
        if isinstance(loan.source, LenderSource):
            self._cached.counts.reads_begin(len(self._ranks), self._cached.clock())
        loan.block_reads[first] = dict(
            enumerate(loan.source.start_read(block_ids, blocks, partial(self._quiet, loan, first)))
        )

    def _quiet(
        self, loan: TakenLoan, first: int, rank: int, fingerprints: tuple[bytes, ...] | None, peer_gone: bool
    ) -> None:
        """Post the completion of a block read.

        From any thread.
        """
        self._post(partial(self._read_completed, ReadCompletion(loan, first, rank, fingerprints, peer_gone)))

    def _abandon(self, loan: TakenLoan, needed: bool) -> bool:
        """Withdraw reads.

        Returns False when the sequence lost blocks to posted reads and gets no others for them.

        A block is in flight while any rank may write its part. Only a sequence that continues is `needed` new blocks;
        for one that is over they would only evict cached blocks.
        """
        sequence, lost = loan.wanted.sequence, list[int]()
        for first, block_read in loan.block_reads.items():
            writing = {rank: blocks for rank, each in block_read.items() if (blocks := each.withdraw())}
            if writing:
                unsafe = dict.fromkeys(block for each in writing.values() for block in each)
                loan.quarantined[first] = Quarantined(list(unsafe), set(writing))
                target = sequence.blocks[first : first + self._blocks_per_read]
                lost += [index for index, block in enumerate(target, first) if block in unsafe]
        loan.block_reads.clear()
        return not lost or self._kv_cache.quarantine_unbound(sequence, lost, replace=needed)

    def _close(self, loan: TakenLoan, mismatched: int, failure: str, lost_blocks: bool, cancelled: bool) -> None:
        wanted, account = loan.wanted, loan.wanted.account
        del self.loans[wanted.sequence.request_id]
        account.mismatched_blocks += mismatched
        if isinstance(loan.source, LenderSource):
            self._cached.counts.num_mismatched += mismatched
        if failure and not cancelled:
            self._name_failure(loan, mismatched, failure)
        if isinstance(loan.source, LenderSource):
            account.times["loan_closed"] = self._cached.clock()
            if account.moved_blocks:
                account.lanes = loan.source.lanes
        else:
            self.store.closed(loan)
        loan.source.close()
        if not cancelled and (lost_blocks or not self._ask_next(loan)):
            wanted.owner.loan_over(wanted.sequence, lost_blocks)

    def _ask_next(self, loan: TakenLoan) -> bool:
        """Ask the source after a loan's own, if there is one; return whether one was asked."""
        is_local = isinstance(loan.source, StoreSource) and loan.source.is_local
        return is_local and self._take_from_others(loan.wanted)

    def _take_from_others(self, wanted: BorrowRequest[Any]) -> bool:
        return self.store.take_shared(wanted) or self._borrow(wanted)

    def _name_failure(self, loan: TakenLoan, mismatched: int, failure: str) -> None:
        """Name a loan's failure in the account, and tell its source of a block that arrived wrong."""
        account = loan.wanted.account
        match loan.source:
            case LenderSource():
                silence = f"the lender was silent for {loan.silent_s:.1f} s: " if loan.silent_s else ""
                account.loan_failure = silence + failure
            case StoreSource(is_local=is_local):
                if failure == NONE_HELD:
                    return  # a miss
                account.store_failed(is_local, failure)
                if mismatched:
                    loan.source.spoiled(loan.next_name)

    def _count(self, loan: TakenLoan, first: int, end: int) -> None:
        account, block_range = loan.wanted.account, loan.wanted.block_range
        count = block_range.num_chain_blocks(first, end)
        if isinstance(loan.source, StoreSource):
            if loan.source.is_local:
                account.restored_blocks += count
            else:
                account.store_blocks += count
            self._cached.counts.found(LOCAL if loan.source.is_local else STORE, count)
            return
        assert isinstance(loan.source, LenderSource)
        cached_end = min(end, max(first, loan.source.cached_end))
        fetched_end = min(end, max(cached_end, loan.source.fetched_end))
        cached = block_range.num_chain_blocks(first, cached_end)
        fetched = block_range.num_chain_blocks(cached_end, fetched_end)
        account.moved_blocks += count
        account.moved_bytes += (end - first) * self._cached.layout.block_bytes
        self._cached.counts.found(REMOTE, count)
        self._cached.counts.read_bytes += (end - first) * self._cached.layout.block_bytes
        account.lender_cached_blocks += cached
        account.lender_fetched_blocks += fetched
        account.lender_computed_blocks += count - cached - fetched
        account.transport = self._transport_name
        account.times["last_bound"] = self._cached.clock()

    def _split(self, fingerprints: bytes) -> tuple[bytes, ...]:
        """Split fingerprints into one entry per block."""
        width = 8 * self._cached.layout.kv_heads
        return tuple(fingerprints[i : i + width] for i in range(0, len(fingerprints), width))


@dataclass(frozen=True, slots=True)
class _Taker:
    """One loan, as the network calls it."""

    manager: BorrowerManager
    loan: TakenLoan

    def lent(self, message: Lent) -> None:
        self.manager.lent(self.loan, message)

    def ended(self, reason: str) -> None:
        self.manager.ended(self.loan, reason)
