"""The engine core: one step loop over requests, loans taken and loans given.

One thread drives it by `handle`, `handle_posted`, and `step` or its two halves; only `post` may be called from other
threads. Between the halves the runner computes on a thread of its own while messages are still handled, so a handshake
does not wait for steps.
"""

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from queue import SimpleQueue

from engine.core.cache_queries import CacheQueries
from engine.core.load_reports import LoadReporter, ReportSchedule
from engine.core.request_manager import RequestManager
from engine.core.scheduler import schedule
from engine.core.uniform_decode import UniformDecode
from engine.core_types import Chunk, SampleResult, Sequence, StepBudget
from engine.kv.kv_cache_manager import KVCacheManager
from engine.kv.store.shared_store import SharedStore
from engine.kv.tiers.tiers import Tiers
from engine.lending.block_reads import LocalRank, RemoteRank
from engine.lending.borrower_manager import BorrowerManager
from engine.lending.corruption import Corruption
from engine.lending.fast_path import FastPath, FastPathLink
from engine.lending.lender_manager import LenderManager
from engine.lending.loan import Posted, ReadCompletion, StoreFetched, StoreFound, StoreRemoved
from engine.messages.from_engine import Audited, FromEngine, Ready
from engine.messages.to_engine import (
    Audit,
    Cancel,
    CorruptReads,
    Generate,
    InspectCache,
    Lend,
    LendClosed,
    LenderSilent,
    LendReleased,
    LoanBlocks,
    LoanFailed,
    LoanStarted,
    SetBudget,
    TakeSnapshot,
    ToEngine,
)
from engine.model_runner import ModelRunner
from engine.speculation.speculator import Speculator
from kvtransfer.ranks import BlockPart, join_endpoints
from kvtransfer.transport import Transport

Input = ToEngine | Posted


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the engine's work."""

    budget: StepBudget
    max_queued_loans: int = 256
    reserve_output_tokens: int = 256
    """Output tokens for which a starting request reserves blocks, at most; further blocks are taken while available."""
    report_interval_s: float = 0.15
    """Longest time between load reports while the loop runs, in seconds; heartbeats follow them."""
    min_report_interval_s: float = 0.02
    """Shortest time between load reports, in seconds, however much changes."""
    max_step_s: float = 20.0
    """Seconds after which a step counts as hung: the loop, which runs beside it, stops reporting."""
    read_silence_s: float = math.inf
    """Seconds without progress of its reads after which a loan fails."""


class EngineCore:
    """The engine without threads and sockets."""

    def __init__(
        self,
        runner: ModelRunner,
        transport: Transport,
        limits: EngineLimits,
        emit: Callable[[FromEngine], None],
        wake: Callable[[], None] = lambda: None,
        tiers: Tiers | None = None,
        store: SharedStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        speculator: Speculator | None = None,
        others: Seq[RemoteRank] = (),
        fast_path: FastPathLink | None = None,
    ) -> None:
        """Create the engine.

        `emit` is called from `handle` and `step` and must not block.

        `wake` is called by `post`, on its thread, when `handle_posted` has work. `clock` returns seconds. Without a
        `speculator` there are no draft tokens. `others` are the engine's other ranks, each with as many blocks of the
        same numbers; `runner` computes on them too. `fast_path` connects to other engines, see
        `engine/lending/fast_path.py`.
        """
        self._runner = runner
        self._transport = transport
        self._limits = limits
        self._emit = emit
        self._posted: SimpleQueue[Posted] = SimpleQueue()
        self._wake = wake
        self._speculator = speculator
        self._model_fingerprint = runner.layout.fingerprint(runner.info.weights_fingerprint)
        self._kv_cache = KVCacheManager(runner.pool.num_blocks, runner.layout, runner, tiers, clock=clock, store=store)
        part = BlockPart(runner.layout.block_bytes, 0, 1 + len(others))
        self._own = own = LocalRank(transport, part, runner.part_fingerprints, runner.folding, clock)
        self._others = others
        self._fast_path = FastPath(fast_path)
        self._borrower_manager = BorrowerManager(
            self._kv_cache, transport.name, emit, self.post, own, self._fast_path, others, limits.read_silence_s
        )
        self._lender_manager = LenderManager(
            self._kv_cache,
            self._borrower_manager,
            self._model_fingerprint,
            emit,
            self._fast_path,
            limits.max_queued_loans,
            self._next_arrival,
            runner.info.adapter_fingerprints,
        )
        self._requests = RequestManager(
            self._kv_cache,
            self._borrower_manager,
            self._model_fingerprint,
            runner.info.eos_token_ids,
            emit,
            self._next_arrival,
            limits.reserve_output_tokens,
            runner.copy_block,
            runner.info.adapter_fingerprints,
        )
        times = ReportSchedule(limits.report_interval_s, limits.min_report_interval_s, limits.max_step_s)
        self._reports = LoadReporter(self._kv_cache, self._requests, self._lender_manager, times, emit, speculator)
        self._cache_queries = CacheQueries(self._kv_cache, self._model_fingerprint, emit, self.post)
        self._arrivals = 0
        self.uniform_decode = UniformDecode(
            self._kv_cache, self._requests, self._lender_manager, self._reports, limits.budget, self._take_arrivals
        )

    def start(self) -> Ready:
        """Register the pool and return the facts that the front announces."""
        own = self._transport.register(self._runner.pool)
        endpoint = join_endpoints([own, *(rank.endpoint for rank in self._others)])
        self._fast_path.lends_from(endpoint)
        layout, info = self._runner.layout, self._runner.info
        return Ready(
            endpoint=endpoint,
            transport=self._transport.name,
            model_fingerprint=self._model_fingerprint,
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
            kv_heads=layout.kv_heads,
            num_blocks=self._kv_cache.pool.num_blocks,
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_context_tokens,
            adapters=info.adapters,
            store=self._kv_cache.store.identity if self._kv_cache.store is not None else "",
        )

    def post(self, message: Posted) -> None:
        """Hand a message to the loop.

        From any thread.
        """
        self._posted.put(message)
        self._wake()

    def handle_posted(self) -> None:
        """Handle messages that other threads posted, and fast-path announcements from other engines."""
        self._borrower_manager.handle_fast_path()
        while not self._posted.empty():  # only this method takes from it
            self.handle(self._posted.get_nowait())

    @property
    def busy(self) -> bool:
        """Whether there is something to compute and no step runs, so the loop should not wait for messages."""
        return not self._kv_cache.in_step and bool(self._runnable() or self._requests.running_set.forkable)

    def close(self) -> None:
        """Stop all transfers; no transfer touches the pool afterwards."""
        self._transport.close()
        if self._kv_cache.tiers is not None:
            self._kv_cache.tiers.close()
        if self._kv_cache.store is not None:
            self._kv_cache.store.close()

    def step(self) -> bool:
        """Compute one batch and report.

        Returns False when there was nothing to compute.
        """
        batch = self.begin_step()
        if batch:
            self.end_step(batch, self._runner.execute(batch))
        self.report()
        return bool(batch)

    def begin_step(self) -> list[Chunk]:
        """Return the next batch.

        Until `end_step`, messages may be handled while the runner executes the batch. Whatever they end, no other
        sequence gets a block that the batch writes into.
        """
        if not self._requests.num_requests and not self._lender_manager.num_loans:
            return []
        self._requests.running_set.begin_step()
        self._requests.part()
        self._start_loans()
        batch = self._batch_with_room()
        self._requests.finish_filled()
        if self._speculator is not None and batch:
            short = self._requests.running_set.short
            batch = self._speculator.add_draft_tokens(batch, self._kv_cache, self._limits.budget.max_tokens, short)
        now = self._kv_cache.clock()
        self._reports.step_began(now)
        for chunk in batch:
            sequence = chunk.sequence
            if sequence.hedged:
                self._borrower_manager.claim(sequence, chunk.end)
            self._kv_cache.grow(sequence, chunk.end)
            # loan ids are separate and may equal a request's id; decoding sequences were recorded before
            if sequence.sampling is not None and not sequence.decoding:
                self._requests.computing(sequence, now)
        self._kv_cache.begin_step(chunk.sequence for chunk in batch)
        return batch

    def end_step(self, batch: list[Chunk], sampled: list[SampleResult]) -> None:
        """Process the runner's results of the batch from `begin_step`."""
        prompts = [chunk for chunk in batch if not chunk.sequence.decoding]
        seconds = self._reports.step_ended()
        if prompts:
            self._reports.changed = True
            self._kv_cache.rates.computed(sum(chunk.count for chunk in prompts), seconds)
        elif self._speculator is not None:
            self._speculator.step_took(batch, sampled, seconds)
        over = set(self._kv_cache.lingering)
        self._kv_cache.end_step()
        tokens = iter(sampled)
        num_requests = self._requests.num_requests
        results = [(chunk, next(tokens) if chunk.answers else None) for chunk in batch]
        if prompts:  # first tokens leave first: clients wait for them more than for the next token of a stream
            results.sort(key=lambda result: result[0].sequence.decoding)
        for chunk, token in results:
            sequence = chunk.sequence
            if sequence in over or (sequence.sampling is not None and not self._requests.has(sequence)):
                continue  # cancelled meanwhile, or another choice of the request failed just now
            full = self._kv_cache.advance(sequence, chunk.count)
            if sequence.hedged:
                self._borrower_manager.computed(sequence)
            if sequence.sampling is None:
                self._lender_manager.computed(sequence, full)
            elif token is not None:
                if self._speculator is not None:
                    self._speculator.record_result(chunk, token)
                self._requests.computed(sequence, token, chunk.samples)
        self._requests.part()
        # use the blocks that the batch gave back: the loop may sleep before the next step
        self._requests.running_set.restart()
        self._requests.finish_filled()
        self._reports.changed |= self._requests.num_requests != num_requests
        self._start_loans()

    def report(self) -> None:
        """Report changes and load.

        A step that hangs silences the reports.
        """
        self._borrower_manager.give_up_stuck()
        self._kv_cache.write_behind()
        self._kv_cache.pins.expire()
        self._reports.report()

    def handle(self, message: Input) -> None:
        """Handle one message from the front or from the transport's thread."""
        self._reports.changed = True
        match message:
            case Generate():
                self._reports.saw(message.mark)
                self._requests.admit(message)
            case Cancel(request_id, choice):
                self._requests.cancel(request_id, choice)
            case LoanStarted():
                self._borrower_manager.started(message)
            case LoanBlocks():
                self._borrower_manager.announced(message)
            case LenderSilent():
                self._borrower_manager.silent(message)
            case LoanFailed():
                self._borrower_manager.failed(message)
            case ReadCompletion():
                self._borrower_manager.read_completed(message)
            case StoreFound():
                self._borrower_manager.store.found(message)
            case StoreFetched():
                self._borrower_manager.store.fetched(message)
            case Lend():
                self._reports.saw(message.mark)
                self._lender_manager.open(message)
                self._start_loans()
            case LendReleased(loan_id, first, count):
                self._lender_manager.release(loan_id, first, count)
            case LendClosed(loan_id):
                self._lender_manager.close(loan_id)
            case TakeSnapshot():
                self._reports.send_snapshot()
            case SetBudget(budget):
                self._limits = replace(self._limits, budget=budget)
                self.uniform_decode.budget = budget
            case CorruptReads(num_blocks):
                self._own.corruption = Corruption(self._runner, num_blocks)
            case StoreRemoved():
                self._cache_queries.removed(message)
            case InspectCache():
                self._cache_queries.answer(message)
            case Audit(audit_id):
                self._emit(self.audit(audit_id))

    def audit(self, audit_id: int = 0) -> Audited:
        """Check the pool's records against every holder of a block."""
        pool, fault = self._kv_cache.pool, ""
        claims = [sequence.blocks for sequence in [*self._requests.sequences, *self._kv_cache.lingering]]
        claims += [*self._lender_manager.holdings(), self._kv_cache.pins.blocks]
        try:
            pool.check_integrity(claims)
            self._kv_cache.pins.check_integrity()
            promising = [*self._requests.sequences, *self._lender_manager.started_jobs(), *self._kv_cache.lingering]
            promised = sum(sequence.num_reserved for sequence in promising)
            assert promised == pool.num_reserved, f"{pool.num_reserved} blocks are promised, {promised} expected"
        except AssertionError as error:
            fault = str(error) or "an invariant of the pool does not hold"
        return Audited(
            audit_id=audit_id,
            fault=fault,
            held_blocks=pool.num_held - self._kv_cache.pins.num_idle,
            reserved_blocks=pool.num_reserved,
            quarantined_blocks=pool.num_quarantined,
            sequences=self._requests.num_requests,
            loans=self._lender_manager.num_loans,
        )

    # ------------------------------------------------------------------ the loop's parts

    def _start_loans(self) -> None:
        """Start queued loans, or refuse those that would wait while this engine itself waits.

        Otherwise two engines whose requests wait for each other's loans would wait for ever. With this rule an engine
        that is waited for waits only for its own steps. Blocks that a loan takes are not taken back, so an engine whose
        own requests were preempted for lack of blocks gives none away.
        """
        if not self._lender_manager.num_waiting:
            return
        short = self._requests.running_set.short
        if not short:
            self._lender_manager.start_queued()
        if self._lender_manager.num_waiting and (short or self._borrower_manager.waits_for_room):
            self._lender_manager.refuse_queued("no room now, and requests of this worker wait for room themselves")

    def _batch_with_room(self) -> list[Chunk]:
        """Return the next batch with reservations for all its blocks, preempting requests until they fit."""
        while True:
            batch = schedule(self._runnable(), self._limits.budget)
            if self._requests.adopt(batch):
                continue
            if self._requests.running_set.make_room(batch):
                return batch

    def _runnable(self) -> list[Sequence]:
        return self._requests.running_set.running + self._lender_manager.jobs()

    def _next_arrival(self) -> int:
        """Return the next number of the counter that orders requests and loans, arrivals and turns."""
        return self._take_arrivals(1)

    def _take_arrivals(self, count: int) -> int:
        self._arrivals += count
        return self._arrivals - count + 1
