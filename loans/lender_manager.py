"""The loans that this engine gives: performs the lenders' actions."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile

from engine.core_types import EngineSequence
from engine.messages.from_engine import FromEngine, KvAccount, LendReady, LendRefused, LendStarting
from engine.messages.to_engine import Lend
from engine.model_runner import ModelInfo
from kvcache.block_keys import BlockKey, block_keys, root_key
from kvcache.block_range import BlockRange
from kvcache.items import begun_items
from kvcache.kv_stats import POOL
from kvcache.kv_view import KvView
from loans.borrower_manager import BorrowerManager
from loans.fast_path import FastPath
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
from loans.loan import BorrowRequest


@dataclass(slots=True)
class _GivenLoan:
    request: Lend
    machine: LenderLoan
    arrival: int
    asked_at: float
    keys: list[BlockKey]
    """Keys of all full blocks of the request's tokens; kept, since a queued loan is tried at every step."""
    block_range: BlockRange
    """Blocks for the borrower, by position."""
    num_announced: int = 0
    """Position before which blocks were announced."""
    job: EngineSequence | None = None
    fetching: bool = False
    """Whether the job is borrowing or restoring blocks, and is not computed meanwhile."""


class LenderManager:
    """Loans given, by id.

    New ones wait, by priority and arrival, for `start_queued`, and hold nothing meanwhile.

    Only loans that may compute wait. A loan of cached blocks starts at once or is refused, so its borrower never waits
    for capacity.
    """

    def __init__(
        self,
        kv_cache: KvView,
        borrowing: BorrowerManager,
        model_fingerprint: bytes,
        emit: Callable[[FromEngine], None],
        fast_path: FastPath,
        max_queued: int,
        next_arrival: Callable[[], int],
        info: ModelInfo | None = None,
    ) -> None:
        """Create the manager.

        `next_arrival` numbers loans and requests alike, since the scheduler orders them together. `info` tells what the
        model computes; None: neither adapters nor items.
        """
        self._kv_cache = kv_cache
        self._cached = kv_cache.cached
        self._borrower_manager = borrowing
        self._model_fingerprint = model_fingerprint
        self._emit = emit
        self._fast_path = fast_path
        self._max_queued = max_queued
        self._loans: dict[str, _GivenLoan] = {}
        self._waiting: list[str] = []
        self._next_arrival = next_arrival
        self._adapters = info.adapter_fingerprints if info is not None else frozenset[bytes]()
        self._reads_media = info is not None and info.reads_media

    @property
    def num_loans(self) -> int:
        return len(self._loans)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def jobs(self) -> list[EngineSequence]:
        """Sequences to compute now for loans."""
        return [loan.job for loan in self._loans.values() if loan.job is not None and not loan.fetching]

    @property
    def computes(self) -> bool:
        """Whether there are `jobs`."""
        return any(loan.job is not None and not loan.fetching for loan in self._loans.values())

    def started_jobs(self) -> list[EngineSequence]:
        """Sequences of started jobs, including those that are still borrowing."""
        return [loan.job for loan in self._loans.values() if loan.job is not None]

    def holdings(self) -> list[list[int]]:
        """Block lists on which the loans hold references."""
        held = [loan.machine.held_blocks for loan in self._loans.values()]
        return held + [job.blocks for job in self.started_jobs()]

    def waiting_tokens(self) -> int:
        """Return the number of tokens that queued loans will compute; shared blocks count once."""
        missing: set[BlockKey] = set()
        for loan_id in self._waiting:
            keys = self._loans[loan_id].keys
            missing.update(keys[len(self._cached.pool.match(keys)) :])
        for loan in self._loans.values():
            if loan.job is not None:
                missing.difference_update(loan.keys)
        return len(missing) * self._cached.layout.block_tokens

    def open(self, request: Lend) -> None:
        width = self._cached.layout.block_tokens
        num_blocks = request.num_blocks(width)
        if request.loan_id in self._loans or not request.first_block < num_blocks:
            self._refuse(request.loan_id, f"no block is requested in [{request.first_block}, {num_blocks})", bad=True)
        elif request.adapter and request.adapter not in self._adapters:
            self._refuse(request.loan_id, f"this worker has no adapter {request.adapter.hex()}", bad=True)
        elif request.items and not self._reads_media:
            self._refuse(request.loan_id, "this worker's engine reads no media", bad=True)
        elif self._cached.layout.blocks_for(num_blocks * width) > self._cached.pool.num_blocks:
            self._refuse(request.loan_id, f"{num_blocks} blocks in a pool of {self._cached.pool.num_blocks}", bad=False)
        elif request.may_compute and len(self._waiting) >= self._max_queued:
            self._refuse(request.loan_id, f"{len(self._waiting)} loans wait already", bad=False)
        else:
            keys = self._keys(request)
            block_range = self._kv_cache.range_between(keys, request.first_block, len(keys))
            machine = LenderLoan(block_range.start)
            loan = _GivenLoan(
                request, machine, self._next_arrival(), self._cached.clock(), keys, block_range, block_range.start
            )
            self._loans[request.loan_id] = loan
            if not request.may_compute:
                if not self._try_start(loan):
                    del self._loans[request.loan_id]
                    self._refuse(request.loan_id, "no room in the pool for the cached blocks", bad=False)
                return
            self._waiting.append(request.loan_id)
            # a stable sort: equal priorities stay in order of arrival
            self._waiting.sort(key=lambda loan_id: -self._loans[loan_id].request.priority)

    def release(self, loan_id: str, first: int, count: int) -> None:
        self._perform(loan_id, lambda machine: machine.handle(Released(first, count)))

    def close(self, loan_id: str) -> None:
        self._perform(loan_id, lambda machine: machine.handle(Closed()))

    def computed(self, job: EngineSequence, names: Iterable[BlockKey], blocks: Iterable[int]) -> None:
        """Lend the blocks of a job that were computed next."""
        self._announce(job, dict(zip(names, blocks, strict=True)), fetched=False)
        loan = self._loans.get(job.request_id)
        if loan is not None and loan.job is not None and loan.job.num_remaining == 0:
            self._end_job(loan)

    def loan_bound(self, sequence: EngineSequence, first: int) -> None:
        """Lend on the blocks of a job that came from elsewhere."""
        self._announce(sequence, dict(zip(sequence.keys[first:], sequence.blocks[first:], strict=False)), fetched=True)

    def loan_hedged(self, sequence: EngineSequence) -> bool:
        """Return False: a borrower waits for this job, so it goes on without its silent source."""
        return False

    def loan_over(self, sequence: EngineSequence, lost_blocks: bool) -> None:
        """Compute the blocks that the job's own loan did not bring."""
        loan = self._loans[sequence.request_id]
        loan.fetching = False
        if lost_blocks:
            self._lose(loan, "blocks are quarantined for a silent source and no other blocks are free")
        elif sequence.num_remaining == 0:
            self._end_job(loan)
        elif not loan.request.may_compute:
            self._lose(loan, "blocks of the local store could not be restored")

    def _end_job(self, loan: _GivenLoan) -> None:
        """End a job that is computed, and the loan with it where a block was not kept that its end needs."""
        if loan.num_announced < len(loan.block_range.names):
            self._lose(loan, "a block of a window or a state was not kept")
        else:
            self._stop_job(loan)

    def lose(self, job: EngineSequence, reason: str) -> None:
        """End the loan of a job that cannot be computed."""
        if (loan := self._loans.get(job.request_id)) is not None and loan.job is job:
            self._lose(loan, reason)

    def _lose(self, loan: _GivenLoan, reason: str) -> None:
        self._perform(loan.request.loan_id, lambda machine: machine.handle(Lost(reason)))

    def _announce(self, job: EngineSequence, blocks: Mapping[BlockKey, int], fetched: bool) -> None:
        """Announce the blocks that come next in the borrower's range; it needs no others."""
        loan = self._loans[job.request_id]
        if announced := self._next_of(loan, blocks):
            loan.num_announced += len(announced)
            self._perform(job.request_id, lambda machine: machine.handle(Computed(announced, fetched)))

    def _next_of(self, loan: _GivenLoan, blocks: Mapping[BlockKey, int]) -> tuple[int, ...]:
        """Return the blocks among these that come next in the borrower's range."""
        names = islice(loan.block_range.names, loan.num_announced, None)
        return tuple(takewhile(lambda block: block is not None, map(blocks.get, names)))  # type: ignore[arg-type]

    def start_queued(self) -> None:
        """Start queued loans in order while they fit; the first that does not fit keeps its place.

        A loan whose next missing block is being computed for another loan waits for it and lets others pass, so a burst
        of siblings computes the shared blocks once.
        """
        for loan in [self._loans[loan_id] for loan_id in self._waiting]:
            if self._waits_for_sibling(loan):
                continue
            if not self._try_start(loan):
                return
            self._waiting.remove(loan.request.loan_id)

    def _waits_for_sibling(self, loan: _GivenLoan) -> bool:
        computing = [(other.job, other.keys) for other in self._loans.values() if other.job is not None]
        if not computing:
            return False
        num_cached = len(self._cached.pool.match(loan.keys))
        if num_cached == len(loan.keys):
            return False
        missing = loan.keys[num_cached]
        # A key names its whole chain, so it has the same index in every chain that contains it.
        return any(len(job.keys) <= num_cached < len(keys) and keys[num_cached] == missing for job, keys in computing)

    def refuse_queued(self, reason: str) -> None:
        """Refuse all queued loans."""
        for loan_id in self._waiting:
            del self._loans[loan_id]
            self._refuse(loan_id, reason, bad=False)
        self._waiting.clear()

    def _try_start(self, loan: _GivenLoan) -> bool:
        request, width, keys = loan.request, self._cached.layout.block_tokens, loan.keys
        if not request.may_compute:
            end = self._kv_cache.num_cached(keys)
            if not self._kv_cache.resumes_at_boundaries:
                end += self._cached.num_restorable(keys[end:])
            keys = keys[:end]
        end = max(len(keys), request.first_block)
        if end < len(loan.keys):
            loan.block_range = self._kv_cache.range_between(loan.keys, request.first_block, end)
        num_tokens = len(keys) * width
        items = begun_items(request.items, num_tokens)
        job = EngineSequence(
            request_id=request.loan_id,
            token_ids=list(request.token_ids[:num_tokens]),
            num_prompt=num_tokens,
            root=self._root(request),
            adapter=request.adapter,
            sampling=None,
            priority=request.priority,
            arrival=loan.arrival,
            turn=self._next_arrival(),
            tail=tuple(request.token_ids[num_tokens : max(num_tokens + 1, items[-1].end if items else 0)]),
            items=items,
        )
        if not self._kv_cache.start(job, keys, self._cached.layout.blocks_for(job.num_tokens_with_items)):
            return False
        self._cached.counts.looked(POOL, len(loan.keys), job.num_computed // width)
        loan.job, loan.fetching = job, True
        cached = self._next_of(loan, dict(zip(job.keys, job.blocks, strict=True)))
        loan.num_announced += len(cached)
        self._perform(request.loan_id, lambda machine: machine.handle(Start(cached, len(loan.block_range.names))))
        block_range, borrows = self._kv_cache.range_of(job, keys), False if request.borrow else None
        wanted = BorrowRequest(job, block_range, borrows, KvAccount(), self, request.reads_store)
        if loan.job is not None and not self._borrower_manager.take(wanted):
            self.loan_over(job, lost_blocks=False)
        return True

    def _perform(self, loan_id: str, handle: Callable[[LenderLoan], list[Action]]) -> None:
        loan = self._loans.get(loan_id)
        if loan is None:
            return
        for action in handle(loan.machine):
            match action:
                case SendStarting(_, cached_end):
                    queued_ms = (self._cached.clock() - loan.asked_at) * 1e3
                    self._say(loan, LendStarting(loan_id, loan.block_range.end, cached_end, queued_ms))
                case Announce(first, block_ids, fetched):
                    self._cached.pool.acquire(block_ids)
                    fingerprints = self._cached.fingerprints_of(block_ids)
                    self._say(loan, LendReady(loan_id, first, block_ids, fingerprints, fetched))
                case Unhold(block_ids):
                    self._cached.pool.release(block_ids)
                case StopComputing():
                    self._stop_job(loan)
                case Refuse(reason, bad_request):
                    self._emit(LendRefused(loan_id, reason, bad_request))
        if loan.machine.done:
            del self._loans[loan_id]
            if loan_id in self._waiting:
                self._waiting.remove(loan_id)
            else:
                self._cached.pool.touch(loan.keys)

    def _say(self, loan: _GivenLoan, message: LendStarting | LendReady) -> None:
        self._fast_path.announce(loan.request.fast_path, message)
        self._emit(message)

    def _root(self, request: Lend) -> BlockKey:
        return root_key(self._model_fingerprint, request.cache_salt, request.adapter)

    def _keys(self, request: Lend) -> list[BlockKey]:
        width = self._cached.layout.block_tokens
        token_ids = request.token_ids[: request.num_blocks(width) * width]
        return block_keys(self._root(request), token_ids, width, request.items)

    def _stop_job(self, loan: _GivenLoan) -> None:
        if loan.job is not None:
            self._borrower_manager.cancel(loan.job.request_id)
            self._kv_cache.finish(loan.job)
            loan.job = None

    def _refuse(self, loan_id: str, reason: str, bad: bool) -> None:
        self._emit(LendRefused(loan_id, reason, bad_request=bad))
