"""Performs what the borrower machines say: the loans this engine takes."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.bookkeeper import Bookkeeper
from engine.lending.borrower import (
    Abandon,
    Allocate,
    Announced,
    Bind,
    Borrower,
    Cancelled,
    Close,
    Event,
    Failed,
    Landed,
    Read,
    Release,
    Started,
)
from engine.messages import (
    CloseLoan,
    FromEngine,
    KvAccount,
    LoanBlocks,
    LoanFailed,
    LoanStarted,
    OpenLoan,
    ReleaseLoan,
)
from engine.vocabulary import Sequence
from kvtransfer.errors import TransferError
from kvtransfer.transport import Peer, Transport, block_spans, max_blocks_per_read


@dataclass(slots=True, eq=False)
class Loan:
    """One loan: its machine, and the reads that machine has asked for."""

    sequence: Sequence
    machine: Borrower
    account: KvAccount
    peer: Peer | None = None
    reads: dict[int, tuple["Future[None]", int]] = field(default_factory=dict)
    """By first chain index: the read, and how many blocks it fills."""
    quarantined: dict[int, list[int]] = field(default_factory=dict)
    """By first chain index: blocks that are nobody's until that read is quiet."""
    lender_cached_end: int = 0


@dataclass(frozen=True, slots=True)
class ReadLanded:
    """From the transport's thread: a posted read is quiet."""

    loan: Loan
    first: int
    fingerprints: tuple[bytes, ...] | None


class BorrowingDesk:
    """Loans by request. `on_over(sequence, lost_blocks)` is called once per loan, when the request may go on."""

    def __init__(
        self,
        books: Bookkeeper,
        transport: Transport,
        emit: Callable[[FromEngine], None],
        post: Callable[[ReadLanded], None],
        on_over: Callable[[Sequence, bool], None],
    ) -> None:
        self._books = books
        self._transport = transport
        self._emit = emit
        self._post = post
        self._on_over = on_over
        self._loans: dict[str, Loan] = {}
        self._max_read_blocks = max_blocks_per_read(books.layout.block_bytes)

    @property
    def num_loans(self) -> int:
        return len(self._loans)

    @property
    def waits_for_room(self) -> bool:
        """Some lender has not started yet, perhaps because it has no room."""
        return any(loan.machine.opening for loan in self._loans.values())

    def open(self, sequence: Sequence, end: int, account: KvAccount) -> None:
        """Ask for the sequence's chain blocks from those it has up to `end`."""
        first = len(sequence.blocks)
        machine = Borrower(first, end, self._max_read_blocks)
        self._loans[sequence.request_id] = Loan(sequence, machine, account)
        account.times["loan_opened"] = time.monotonic()
        self._emit(OpenLoan(sequence.request_id, first, end))

    def started(self, message: LoanStarted) -> None:
        loan = self._loans.get(message.request_id)
        if loan is None:
            return
        loan.account.times["loan_started"] = time.monotonic()
        loan.account.times["lender_queued_s"] = message.queued_ms / 1e3
        loan.lender_cached_end = message.cached_end_block
        try:
            loan.peer = self._transport.connect(message.endpoint)
        except TransferError as error:
            self._handle(loan, Failed(str(error)))
            return
        self._handle(loan, Started(message.end_block))

    def announced(self, message: LoanBlocks) -> None:
        loan = self._loans.get(message.request_id)
        if loan is None:
            return
        loan.account.times.setdefault("first_blocks_ready", time.monotonic())
        loan.account.times["last_blocks_ready"] = time.monotonic()
        self._handle(loan, Announced(message.first, message.block_ids, self._split(message.fingerprints)))

    def failed(self, message: LoanFailed) -> None:
        if (loan := self._loans.get(message.request_id)) is not None:
            self._handle(loan, Failed(message.reason))

    def cancel(self, request_id: str) -> None:
        """The request is over. Afterwards its sequence holds no block that may still be written."""
        if (loan := self._loans.get(request_id)) is not None:
            self._handle(loan, Cancelled())

    def landed(self, message: ReadLanded) -> None:
        loan = message.loan
        if (blocks := loan.quarantined.pop(message.first, None)) is not None:
            self._books.pool.unquarantine(blocks)
        elif loan.reads.pop(message.first, None) is not None:
            self._handle(loan, Landed(message.first, message.fingerprints))

    def _handle(self, loan: Loan, event: Event) -> None:
        sequence, lost_blocks = loan.sequence, False
        for action in loan.machine.handle(event):
            match action:
                case Allocate(_, end):
                    self._books.grow(sequence, end * self._books.layout.block_tokens)
                case Read(first, block_ids):
                    self._read(loan, first, block_ids)
                case Bind(first, end, fingerprints):
                    self._books.bind(sequence, end, fingerprints)
                    self._count(loan, first, end)
                case Release(first, count):
                    self._emit(ReleaseLoan(sequence.request_id, first, count))
                case Abandon():
                    lost_blocks = not self._abandon(loan, needed=not isinstance(event, Cancelled))
                case Close(_, mismatched, failure):
                    self._close(loan, mismatched, failure, lost_blocks, isinstance(event, Cancelled))

    def _read(self, loan: Loan, first: int, block_ids: tuple[int, ...]) -> None:
        assert loan.peer is not None
        blocks = loan.sequence.blocks[first : first + len(block_ids)]
        spans = block_spans(zip(blocks, block_ids, strict=True), self._books.layout.block_bytes)
        try:
            future = self._transport.read(loan.peer, spans)
        except ValueError:  # the lender announced a block that its pool does not have
            future = Future()
            future.set_exception(TransferError("announced blocks lie outside the lender's pool"))
        loan.reads[first] = future, len(blocks)
        future.add_done_callback(lambda done: self._quiet(loan, first, blocks, done))

    def _quiet(self, loan: Loan, first: int, blocks: list[int], done: "Future[None]") -> None:
        """On the transport's thread."""
        if done.cancelled():
            return
        fingerprints = None
        if done.exception() is None:
            fingerprints = self._split(self._books.compute_fingerprints(blocks).tobytes())
        self._post(ReadLanded(loan, first, fingerprints))

    def _abandon(self, loan: Loan, needed: bool) -> bool:
        """Withdraw reads; False when the sequence lost blocks to a read in flight and has no others for them.

        Only a sequence that goes on is `needed` others: for one that is over they would only evict what is cached.
        """
        lost: list[int] = []
        for first, (future, count) in loan.reads.items():
            if future.cancel() or future.done():
                continue
            indices = range(first, first + count)
            loan.quarantined[first] = [loan.sequence.blocks[index] for index in indices]
            lost += indices
        loan.reads.clear()
        return not lost or self._books.quarantine_unbound(loan.sequence, lost, replace=needed)

    def _close(self, loan: Loan, mismatched: int, failure: str, lost_blocks: bool, cancelled: bool) -> None:
        del self._loans[loan.sequence.request_id]
        loan.account.mismatched_blocks = mismatched
        loan.account.loan_failure = failure
        loan.account.times["loan_closed"] = time.monotonic()
        if loan.peer is not None and loan.account.moved_blocks:
            loan.account.lanes = loan.peer.lanes
        self._emit(CloseLoan(loan.sequence.request_id))
        if not cancelled:
            self._on_over(loan.sequence, lost_blocks)

    def _count(self, loan: Loan, first: int, end: int) -> None:
        account, count = loan.account, end - first
        cached = max(0, min(end, loan.lender_cached_end) - first)
        account.moved_blocks += count
        account.moved_bytes += count * self._books.layout.block_bytes
        account.lender_cached_blocks += cached
        account.lender_computed_blocks += count - cached
        account.transport = self._transport.name
        account.times["last_bound"] = time.monotonic()

    def _split(self, fingerprints: bytes) -> tuple[bytes, ...]:
        """One entry per block."""
        width = 8 * self._books.layout.kv_heads
        return tuple(fingerprints[i : i + width] for i in range(0, len(fingerprints), width))
