"""The loans that this engine gives: performs the lenders' actions."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count, islice, takewhile
from typing import Generic, Protocol, TypeVar

from cluster.logs import of
from kvcache.block_keys import BlockKey
from kvcache.chain import BlockRange, Chain
from kvcache.items import Item, begun_items, items_fault
from kvcache.kv_stats import POOL
from kvcache.kv_view import KvView, belongs
from loans.account import KvAccount
from loans.borrower_manager import BorrowerManager
from loans.lender import (
    Action,
    Announce,
    Closed,
    Computed,
    LenderLoan,
    Lost,
    Refuse,
    Released,
    SendStarting,
    Start,
    StopComputing,
    Unhold,
)
from loans.loan import BorrowRequest, C
from loans.network import Blocks, Lender, LoanGiven, Want
from loans.network import Started as LoanStarted

log = logging.getLogger(__name__)
TOLD_TO_STOP = "this worker was told to stop"

C_co = TypeVar("C_co", bound=Chain, covariant=True)


class MakesJob(Protocol[C_co]):
    """Maker of the chain that an engine computes for a loan."""

    def __call__(
        self,
        *,
        request_id: str,
        token_ids: list[int],
        num_prompt: int,
        root: BlockKey,
        priority: int,
        arrival: int,
        turn: int,
        adapter: bytes,
        tail: tuple[int, ...],
        items: tuple[Item, ...],
        given_keys: tuple[BlockKey, ...],
    ) -> C_co: ...


@dataclass(frozen=True, slots=True)
class LenderLimits:
    """Limits of the loans that an engine gives."""

    max_queued: int
    vocab_size: int
    adapters: frozenset[bytes] = frozenset()
    """Fingerprints of the adapters that it computes with."""
    reads_media: bool = False


def want_fault(want: Want, block_tokens: int, vocab_size: int) -> str:
    """Return what is wrong with a want whatever the lender has; empty where nothing is."""
    num_blocks = len(want.keys)
    if not want.first_block < num_blocks:
        return f"first_block: must be below the {num_blocks} blocks wanted, not {want.first_block}"
    if len(want.token_ids) < num_blocks * block_tokens:
        return f"token_ids: {len(want.token_ids)} tokens do not fill {num_blocks} blocks of {block_tokens}"
    if max(want.token_ids) >= vocab_size:
        return f"token_ids: must be below {vocab_size}, not {max(want.token_ids)}"
    if fault := items_fault(want.items, len(want.token_ids)):
        return f"items: {fault}"
    if not belongs(want.keys, want.root, want.token_ids, block_tokens, want.items):
        return "keys: do not begin with the key of the first block"
    return ""


@dataclass(slots=True)
class GivenLoan(Generic[C]):
    """One loan that is not over."""

    loan_id: str
    channel: LoanGiven
    request: Want
    machine: LenderLoan
    arrival: int
    asked_at: float
    block_range: BlockRange
    """Blocks for the borrower, by position."""
    num_announced: int = 0
    """Position before which blocks were announced."""
    job: C | None = None
    fetching: bool = False
    """Whether the job is borrowing or restoring blocks, and is not computed meanwhile."""


class LenderManager(Generic[C]):
    """Loans given, by id.

    New ones wait, by priority and arrival, for `start_queued`, and hold nothing meanwhile.

    Only loans that may compute wait. A loan of cached blocks starts at once or is refused, so its borrower never waits
    for capacity.
    """

    def __init__(
        self,
        kv_cache: KvView,
        borrowing: BorrowerManager,
        limits: LenderLimits,
        next_arrival: Callable[[], int],
        make_job: MakesJob[C],
    ) -> None:
        """Create the manager.

        `next_arrival` numbers loans and requests alike, since the scheduler orders them together.
        """
        self._kv_cache = kv_cache
        self._cached = kv_cache.cached
        self._borrower_manager = borrowing
        self._limits = limits
        self.loans: dict[str, GivenLoan[C]] = {}
        """Loans that are not over."""
        self._by_channel: dict[LoanGiven, str] = {}
        self.waiting: list[str] = []
        """Ids of loans that wait for capacity, in their order."""
        self._next_arrival = next_arrival
        self._make_job = make_job
        self._numbers = count(1)
        self.is_draining = False
        """Whether loans that compute are refused. Cached blocks can be read until the worker ends."""

    @property
    def num_loans(self) -> int:
        return len(self.loans)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def jobs(self) -> list[C]:
        """Sequences to compute now for loans."""
        return [loan.job for loan in self.loans.values() if loan.job is not None and not loan.fetching]

    @property
    def computes(self) -> bool:
        """Whether there are `jobs`."""
        return any(loan.job is not None and not loan.fetching for loan in self.loans.values())

    def started_jobs(self) -> list[C]:
        """Sequences of started jobs, including those that are still borrowing."""
        return [loan.job for loan in self.loans.values() if loan.job is not None]

    def holdings(self) -> list[list[int]]:
        """Block lists on which the loans hold references."""
        held = [loan.machine.held_blocks for loan in self.loans.values()]
        return held + [job.blocks for job in self.started_jobs()]

    def waiting_tokens(self) -> int:
        """Return the number of tokens that queued loans will compute; shared blocks count once."""
        missing: set[BlockKey] = set()
        for loan_id in self.waiting:
            keys = self.loans[loan_id].request.keys
            missing.update(keys[len(self._cached.pool.match(keys)) :])
        for loan in self.loans.values():
            if loan.job is not None:
                missing.difference_update(loan.request.keys)
        return len(missing) * self._cached.layout.block_tokens

    def open(self, channel: LoanGiven, want: Want) -> None:
        """Take a loan, or refuse it."""
        if refusal := self._refusal(want):
            channel.refuse(refusal)
            return
        loan_id, first, arrival = f"loan-{next(self._numbers)}", want.first_block, self._next_arrival()
        block_range = self._kv_cache.range_between(want.keys, first, len(want.keys))
        machine, asked_at = LenderLoan(block_range.start), self._cached.clock()
        loan = GivenLoan[C](loan_id, channel, want, machine, arrival, asked_at, block_range, block_range.start)
        self.loans[loan_id], self._by_channel[channel] = loan, loan_id
        if not want.may_compute:
            if not self._try_start(loan):
                self._forget(loan)
                channel.refuse("no room in the pool for the cached blocks")
            return
        self.waiting.append(loan_id)
        # a stable sort: equal priorities stay in order of arrival
        self.waiting.sort(key=lambda loan_id: -self.loans[loan_id].request.priority)

    def release(self, channel: LoanGiven, first: int, num_blocks: int) -> None:
        """Process that a borrower has read blocks."""
        if (loan := self.loan_of(channel)) is not None:
            self._perform(loan.loan_id, lambda machine: machine.handle(Released(first, num_blocks)))

    def close(self, channel: LoanGiven) -> None:
        """Process that a borrower, or the connection, ended its loan."""
        if (loan := self.loan_of(channel)) is not None:
            self._perform(loan.loan_id, lambda machine: machine.handle(Closed()))

    def end_all(self) -> None:
        """End all loans: this worker was told to stop."""
        for loan in list(self.loans.values()):
            self._lose(loan, TOLD_TO_STOP)

    def loan_of(self, channel: LoanGiven) -> GivenLoan[C] | None:
        """Return the loan of a channel; None where it is over."""
        loan_id = self._by_channel.get(channel)
        return None if loan_id is None else self.loans.get(loan_id)

    def _refusal(self, want: Want) -> str:
        """Return why a loan cannot be given; empty where it can."""
        layout, limits, num_blocks = self._cached.layout, self._limits, len(want.keys)
        num_tokens = num_blocks * layout.block_tokens
        if want.adapter and want.adapter not in limits.adapters:
            return f"adapter: this worker has no adapter {want.adapter.hex()}"
        if want.items and not limits.reads_media:
            return "items: this worker's engine reads no media"
        if fault := want_fault(want, layout.block_tokens, limits.vocab_size):
            return fault
        if layout.blocks_for(num_tokens) > self._cached.pool.num_blocks:
            return f"{num_blocks} blocks in a pool of {self._cached.pool.num_blocks}"
        if want.may_compute and self.is_draining:
            return TOLD_TO_STOP
        if want.may_compute and len(self.waiting) >= limits.max_queued:
            return f"{len(self.waiting)} loans wait already"
        return ""

    def computed(self, job: C, names: Iterable[BlockKey], blocks: Iterable[int]) -> None:
        """Lend the blocks of a job that were computed next."""
        self._announce(job, dict(zip(names, blocks, strict=True)), fetched=False)
        loan = self.loans.get(job.request_id)
        if loan is not None and loan.job is not None and loan.job.num_remaining == 0:
            self._end_job(loan)

    def loan_bound(self, sequence: C, first: int) -> None:
        """Lend on the blocks of a job that came from elsewhere."""
        self._announce(sequence, dict(zip(sequence.keys[first:], sequence.blocks[first:], strict=False)), fetched=True)

    def loan_hedged(self, sequence: C) -> bool:
        """Return False: a borrower waits for this job, so it goes on without its silent source."""
        return False

    def loan_over(self, sequence: C, lost_blocks: bool) -> None:
        """Compute the blocks that the job's own loan did not bring."""
        loan = self.loans[sequence.request_id]
        loan.fetching = False
        if lost_blocks:
            self._lose(loan, "blocks are quarantined for a silent source and no other blocks are free")
        elif sequence.num_remaining == 0:
            self._end_job(loan)
        elif not loan.request.may_compute:
            self._lose(loan, "blocks of the local store could not be restored")

    def _end_job(self, loan: GivenLoan[C]) -> None:
        """End a job that is computed, and the loan with it where a block was not kept that its end needs."""
        if loan.num_announced < len(loan.block_range.names):
            self._lose(loan, "a block of a window or a state was not kept")
        else:
            self._stop_job(loan)

    def lose(self, job: Chain, reason: str) -> None:
        """End the loan of a job that cannot be computed."""
        if (loan := self.loans.get(job.request_id)) is not None and loan.job is job:
            self._lose(loan, reason)

    def _lose(self, loan: GivenLoan[C], reason: str) -> None:
        self._perform(loan.loan_id, lambda machine: machine.handle(Lost(reason)))

    def _announce(self, job: Chain, blocks: Mapping[BlockKey, int], fetched: bool) -> None:
        """Announce the blocks that come next in the borrower's range; it needs no others."""
        loan = self.loans[job.request_id]
        if announced := self._next_of(loan, blocks):
            loan.num_announced += len(announced)
            self._perform(job.request_id, lambda machine: machine.handle(Computed(announced, fetched)))

    def _next_of(self, loan: GivenLoan[C], blocks: Mapping[BlockKey, int]) -> tuple[int, ...]:
        """Return the blocks among these that come next in the borrower's range."""
        names = islice(loan.block_range.names, loan.num_announced, None)
        return tuple(takewhile(lambda block: block is not None, map(blocks.get, names)))  # type: ignore[arg-type]

    def start_queued(self) -> None:
        """Start queued loans in order while they fit; the first that does not fit keeps its place.

        A loan whose next missing block is being computed for another loan waits for it and lets others pass, so a burst
        of siblings computes the shared blocks once.
        """
        for loan in [self.loans[loan_id] for loan_id in self.waiting]:
            if self._waits_for_sibling(loan):
                continue
            if not self._try_start(loan):
                return
            if loan.loan_id in self.waiting:  # otherwise it was lost at once
                self.waiting.remove(loan.loan_id)

    def _waits_for_sibling(self, loan: GivenLoan[C]) -> bool:
        computing = [(other.job, other.request.keys) for other in self.loans.values() if other.job is not None]
        if not computing:
            return False
        num_cached = len(self._cached.pool.match(loan.request.keys))
        if num_cached == len(loan.request.keys):
            return False
        missing = loan.request.keys[num_cached]
        # A key names its whole chain, so it has the same index in every chain that contains it.
        return any(len(job.keys) <= num_cached < len(keys) and keys[num_cached] == missing for job, keys in computing)

    def refuse_queued(self, reason: str) -> None:
        """Refuse all queued loans."""
        for loan in [self.loans[loan_id] for loan_id in self.waiting]:
            self._forget(loan)
            loan.channel.refuse(reason)

    def _try_start(self, loan: GivenLoan[C]) -> bool:
        want, width = loan.request, self._cached.layout.block_tokens
        keys = list(want.keys)
        if not want.may_compute:
            end = self._kv_cache.num_cached(keys)
            if not self._kv_cache.resumes_at_boundaries:
                end += self._cached.num_restorable(keys[end:])
            keys = keys[:end]
        end = max(len(keys), want.first_block)
        if end < len(want.keys):
            loan.block_range = self._kv_cache.range_between(want.keys, want.first_block, end)
        num_tokens = len(keys) * width
        items = begun_items(want.items, num_tokens)
        job = self._make_job(
            request_id=loan.loan_id,
            token_ids=list(want.token_ids[:num_tokens]),
            num_prompt=num_tokens,
            root=want.root,
            priority=want.priority,
            arrival=loan.arrival,
            turn=self._next_arrival(),
            adapter=want.adapter,
            tail=tuple(want.token_ids[num_tokens : max(num_tokens + 1, items[-1].end if items else 0)]),
            items=items,
            given_keys=tuple(keys),
        )
        if not self._kv_cache.start(job, keys, self._cached.layout.blocks_for(job.num_tokens_with_items)):
            return False
        self._cached.counts.looked(POOL, len(want.keys), job.num_computed // width)
        loan.job, loan.fetching = job, True
        cached = self._next_of(loan, dict(zip(job.keys, job.blocks, strict=True)))
        loan.num_announced += len(cached)
        self._perform(loan.loan_id, lambda machine: machine.handle(Start(cached, len(loan.block_range.names))))
        source = None if want.source is None else Lender(want.source, may_compute=False)
        wanted = BorrowRequest(
            job,
            keys,
            self._kv_cache.range_of(job, keys),
            source,
            KvAccount(),
            self,
            want.reads_store,
            log_id=want.request_id,
        )
        if loan.job is not None and not self._borrower_manager.take(wanted):
            self.loan_over(job, lost_blocks=False)
        return True

    def _perform(self, loan_id: str, handle: Callable[[LenderLoan], list[Action]]) -> None:
        loan = self.loans.get(loan_id)
        if loan is None:
            return
        for action in handle(loan.machine):
            match action:
                case SendStarting(_, cached_end):
                    queued_ms = (self._cached.clock() - loan.asked_at) * 1e3
                    loan.channel.send(LoanStarted(loan.block_range.end, cached_end, queued_ms))
                case Announce(first, block_ids, fetched):
                    self._cached.pool.acquire(block_ids)
                    fingerprints = self._cached.fingerprints_of(block_ids)
                    loan.channel.send(Blocks(first, block_ids, fingerprints, fetched))
                case Unhold(block_ids):
                    self._cached.pool.release(block_ids)
                case StopComputing():
                    self._stop_job(loan)
                case Refuse(reason, bad_request):
                    level = logging.WARNING if bad_request else logging.INFO
                    log.log(level, "%s is refused: %s", loan_id, reason, extra=of(loan.request.request_id))
                    loan.channel.refuse(reason)
        if loan.machine.done and not self._forget(loan):
            self._cached.pool.touch(loan.request.keys)

    def _forget(self, loan: GivenLoan[C]) -> bool:
        """Forget a loan; return whether it was waiting."""
        del self.loans[loan.loan_id], self._by_channel[loan.channel]
        if loan.loan_id not in self.waiting:
            return False
        self.waiting.remove(loan.loan_id)
        return True

    def _stop_job(self, loan: GivenLoan[C]) -> None:
        if loan.job is not None:
            self._borrower_manager.cancel(loan.job.request_id)
            self._kv_cache.finish(loan.job)
            loan.job = None
