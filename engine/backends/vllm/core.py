"""Core of a vLLM engine: vLLM's EngineCore between Tandem's loans and Tandem's messages.

One thread drives it by `handle`, `handle_posted`, and the two halves of a step; only `post` may be called from other
threads. Between the halves vLLM's executor computes on a thread of its own while messages are still handled. vLLM's
scheduler and block pool are used by the driving thread alone, and no request is taken from them during a step.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from engine.backends.vllm.kv_cache import VllmKVCache
from engine.backends.vllm.kv_memory import VllmKvMemory
from engine.backends.vllm.rank_executor import Batch
from engine.backends.vllm.requests import VllmRequests
from engine.backends.vllm.submitted import Submissions, Submitted
from engine.core.cache_queries import CacheQueries
from engine.core.engine_core import EngineLimits, Input
from engine.core.load_reports import LoadReporter, ReportSchedule
from engine.core_types import Sequence
from engine.kv.store.shared_store import SharedStore
from engine.lending.block_reads import LocalRank, RemoteRank
from engine.lending.borrower_manager import BorrowerManager
from engine.lending.fast_path import FastPath, FastPathLink
from engine.lending.lender_manager import LenderManager
from engine.lending.loan import BorrowRequest, Posted, ReadCompletion, StoreFetched, StoreFound, StoreRemoved
from engine.messages.from_engine import Audited, FromEngine, Ready
from engine.messages.to_engine import (
    Audit,
    Cancel,
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
)
from engine.model_runner import ModelInfo
from kvtransfer.ranks import join_endpoints, with_planes
from kvtransfer.transport import Transport


class _HardeningBorrower(BorrowerManager):
    """Borrower manager whose waiting sequences hold the blocks that they were promised."""

    _kv_cache: VllmKVCache

    def take(self, wanted: BorrowRequest) -> bool:
        if not super().take(wanted):
            return False
        self._kv_cache.harden(wanted.sequence)
        return True


class VllmCore:
    """The engine without threads and sockets."""

    def __init__(
        self,
        engine: Any,
        memory: VllmKvMemory,
        block_pool: Any,
        info: ModelInfo,
        lora: Mapping[bytes, Any],
        transport: Transport,
        limits: EngineLimits,
        emit: Callable[[FromEngine], None],
        wake: Callable[[], None] = lambda: None,
        fast_path: FastPathLink | None = None,
        others: Seq[RemoteRank] = (),
        store: SharedStore | None = None,
    ) -> None:
        """Create the core.

        `engine` is vLLM's EngineCore and `block_pool` its BlockPool. `lora` has vLLM's LoRARequest of each adapter, by
        the adapter's fingerprint. The other arguments are as for `engine/core/engine_core.py`.
        """
        self._engine = engine
        self._scheduler = engine.scheduler
        self._memory = memory
        self._info = info
        self._transport = transport
        self._limits = limits
        self._emit = emit
        self._wake = wake
        self._posted: SimpleQueue[Posted] = SimpleQueue()
        self._arrivals = 0
        self._blocked = False
        """Whether the last schedule was empty, and nothing has happened since."""
        self._model_fingerprint = memory.layout.fingerprint(info.weights_fingerprint)
        self._kv_cache = VllmKVCache(memory, block_pool, time.monotonic, self._finished, store)
        own = LocalRank(transport, memory.part, memory.part_fingerprints)
        self._others = others
        self._fast_path = FastPath(fast_path)
        self._borrower_manager = _HardeningBorrower(
            self._kv_cache,
            transport.name,
            emit,
            self.post,
            own,
            self._fast_path,
            others,
            read_silence_s=limits.read_silence_s,
        )
        self._lender_manager = LenderManager(
            self._kv_cache,
            self._borrower_manager,
            self._model_fingerprint,
            emit,
            self._fast_path,
            limits.max_queued_loans,
            self._next_arrival,
            info.adapter_fingerprints,
        )
        self._submissions = Submissions(
            self._scheduler, self._kv_cache, info.eos_token_ids, lora, self._on_scheduled, self._on_filled
        )
        self._requests = VllmRequests(
            self._kv_cache,
            self._borrower_manager,
            self._submissions,
            self._model_fingerprint,
            info.eos_token_ids,
            emit,
            self._next_arrival,
            limits.reserve_output_tokens,
            info.adapter_fingerprints,
        )
        times = ReportSchedule(limits.report_interval_s, limits.min_report_interval_s, limits.max_step_s)
        self._reports = LoadReporter(self._kv_cache, self._requests, self._lender_manager, times, emit)
        self._cache_queries = CacheQueries(self._kv_cache, self._model_fingerprint, emit, self.post)

    def start(self) -> Ready:
        """Register the pool and return the facts that the front announces."""
        part = self._memory.part
        ranks = [self._transport.register(self._memory.pool), *(rank.endpoint for rank in self._others)]
        endpoint = with_planes(join_endpoints(ranks), part.planes, part.num_blocks)
        self._fast_path.lends_from(endpoint)
        layout = self._memory.layout
        return Ready(
            endpoint=endpoint,
            transport=self._transport.name,
            model_fingerprint=self._model_fingerprint,
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
            kv_heads=layout.kv_heads,
            num_blocks=self._kv_cache.pool.num_blocks,
            vocab_size=self._info.vocab_size,
            max_context_tokens=self._info.max_context_tokens,
            adapters=self._info.adapters,
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
        """Whether a step may begin now, so the loop should not wait for messages."""
        return not self._kv_cache.stepping and not self._blocked and bool(self._scheduler.has_requests())

    def close(self) -> None:
        """Stop all transfers, then vLLM."""
        self._transport.close()
        if self._kv_cache.store is not None:
            self._kv_cache.store.close()
        self._engine.shutdown()

    def begin_step(self) -> Batch | None:
        """Return vLLM's next batch, which may be empty but for requests to forget; None when there is nothing to do."""
        if not self._lender_manager.num_loans and not self._scheduler.has_requests():
            return None
        self._start_loans()
        self._submit_jobs()
        if self._blocked or not self._scheduler.has_requests():
            return None
        budget = self._limits.budget
        most = budget.max_prefill_tokens + self._submissions.num_decoding
        self._scheduler.max_num_scheduled_tokens = min(budget.max_tokens, most)
        output = self._scheduler.schedule()
        self._submissions.after_schedule(output)
        self._blocked = not output.total_num_scheduled_tokens and not output.finished_req_ids
        if self._blocked:  # vLLM must see the outcome of each schedule, also of an empty one
            self._reports.changed = True
        self._reports.step_began(self._kv_cache.clock())
        self._kv_cache.stepping = True
        return Batch(output, self._submissions.filled_by(output) if self._others else [])

    def end_step(self, batch: Batch, computed: Any) -> None:
        """Process the executor's result of the batch from `begin_step`."""
        output = batch.output
        seconds = self._reports.step_ended()
        num_requests = self._requests.num_requests
        prompt_tokens = sum(count for count in output.num_scheduled_tokens.values() if count > 1)
        if prompt_tokens:
            self._reports.changed = True
            self._kv_cache.rates.computed(prompt_tokens, seconds)
        self._submissions.after_step(output)
        self._submissions.abort_removed()
        outputs = self._scheduler.update_from_output(output, computed)
        self._kv_cache.stepping = False
        for of_client in outputs.values():
            for each in of_client.outputs:
                submitted = self._submissions.get(each.request_id)
                if submitted is not None and submitted.sequence.sampling is not None:
                    self._requests.produced(submitted, each)
        self._reports.changed |= self._requests.num_requests != num_requests
        self._start_loans()
        self._submit_jobs()

    def report(self) -> None:
        """Report changes and load.

        A step that hangs silences the reports.
        """
        self._borrower_manager.give_up_stuck()
        self._kv_cache.write_behind()
        self._reports.report()

    def handle(self, message: Input) -> None:
        """Handle one message from the front or from the transport's thread."""
        self._reports.changed = True
        self._blocked = False
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
            case StoreRemoved():
                self._cache_queries.removed(message)
            case InspectCache():
                self._cache_queries.answer(message)
            case Audit(audit_id):
                self._emit(self.audit(audit_id))

    def audit(self, audit_id: int = 0) -> Audited:
        """Check vLLM's block pool against every holder of a block: Tandem's, and vLLM's own requests."""
        pool, fault = self._kv_cache.pool, ""
        claims = [sequence.blocks for sequence in self._requests.sequences]
        claims += self._kv_cache.hardened + self._submissions.holdings() + self._lender_manager.holdings()
        try:
            pool.check_integrity(claims)
            reserving = [*self._requests.sequences, *self._lender_manager.started_jobs()]
            promised = sum(sequence.num_reserved for sequence in reserving) + self._requests.num_reserved
            assert promised == pool.num_reserved, f"{pool.num_reserved} blocks are promised, {promised} expected"
        except AssertionError as error:
            fault = str(error) or "an invariant of the pool does not hold"
        return Audited(
            audit_id=audit_id,
            fault=fault,
            held_blocks=pool.num_held,
            reserved_blocks=pool.num_reserved,
            quarantined_blocks=pool.num_quarantined,
            sequences=self._requests.num_requests,
            loans=self._lender_manager.num_loans,
        )

    # ------------------------------------------------------------------ parts

    def _start_loans(self) -> None:
        """Start queued loans, or refuse those that would wait while this engine itself waits.

        Otherwise two engines whose requests wait for each other's loans would wait for ever.
        """
        if not self._lender_manager.num_waiting:
            return
        short = self._requests.short
        if not short:
            self._lender_manager.start_queued()
        if self._lender_manager.num_waiting and (short or self._borrower_manager.waits_for_room):
            self._lender_manager.refuse_queued("no room now, and requests of this worker wait for room themselves")

    def _submit_jobs(self) -> None:
        """Let vLLM compute what loans lack."""
        for job in self._lender_manager.jobs():
            if job not in self._submissions:
                self._submissions.add(job, self._kv_cache.layout.blocks_for(job.num_tokens))
                self._blocked = False

    def _on_scheduled(self, submitted: Submitted, num_hits: int) -> None:
        if submitted.sequence.sampling is not None:
            self._requests.scheduled(submitted, num_hits)

    def _on_filled(self, submitted: Submitted, known: int) -> None:
        """Lend the blocks of a job that became full."""
        job = submitted.sequence
        if job.sampling is None and len(job.keys) > known:
            self._lender_manager.computed(job, submitted.blocks[known : len(job.keys)])

    def _finished(self, sequence: Sequence) -> None:
        self._blocked = False
        self._submissions.remove(sequence)

    def _next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals
