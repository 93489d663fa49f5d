"""Part of an engine core that does not depend on how the engine steps: messages, loans, reports and the audit.

`engine/core/engine_core.py` (Tandem's own scheduler) and `engine/backends/vllm/core.py` (vLLM's) are its subclasses.
One thread drives a core; only `post` may be called from other threads.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

from engine.core.cache_queries import CacheQueries
from engine.core.load_reports import DraftCounts, LoadReporter, ReportSchedule
from engine.core.request_table import RequestTable, TableParts
from engine.core_types import StepBudget
from engine.messages.from_engine import Audited, FromEngine, Ready
from engine.messages.to_engine import (
    Audit,
    Cancel,
    Connect,
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
from engine.model_runner import ModelInfo
from kvcache.cached_blocks import BlockMemory
from kvcache.kv_view import KvView
from kvtransfer.ranks import RankGrid
from kvtransfer.transport import AnyPool, Transport
from loans.borrower_manager import BorrowerManager
from loans.connections import Connections
from loans.fast_path import FastPath, FastPathLink
from loans.lender_manager import LenderManager
from loans.loan import ConnectionRead, Posted, ReadCompletion, StoreFetched, StoreFound, StoreRemoved
from loans.reads.block_reads import LocalRank, Rank, RemoteRank
from loans.reads.corruption import Corruption

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


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Parts that an engine core is made of, and its connections to the process around it."""

    transport: Transport | None
    """Transport of this process's KV memory; None where other processes have all of it."""
    limits: EngineLimits
    emit: Callable[[FromEngine], None]
    """Function that sends a message to the front; must not block."""
    wake: Callable[[], None] = lambda: None
    """Function that `post` calls, on its thread, when `handle_posted` has work."""
    fast_path: FastPathLink | None = None
    """Link to other engines, see `loans/fast_path.py`."""
    others: Sequence[RemoteRank] = ()
    """Other ranks of the engine, each with as many blocks of the same numbers."""
    grid: RankGrid | None = None
    """Parts of every block that all ranks hold; None: each has some heads."""


class LoanHost(ABC):
    """An engine core without its steps."""

    _requests: RequestTable[Any]

    def __init__(
        self,
        parts: EngineParts,
        info: ModelInfo,
        pool: AnyPool | None,
        own: LocalRank | None,
        kv_cache: KvView,
        blocks: BlockMemory,
    ) -> None:
        """Create the managers of loans; a subclass then makes its requests and calls `_serve`.

        `pool` is this rank's KV memory, `own` reads into it, and `blocks` changes bytes of it in a drill. Pool and rank
        are None where other processes have all KV memory.
        """
        ranks: list[Rank] = [*([own] if own is not None else []), *parts.others]
        self._transport_name = parts.transport.name if parts.transport is not None else parts.others[0].transport
        self._parts, self._limits, self._emit = parts, parts.limits, parts.emit
        self._info, self._pool, self._own, self._blocks = info, pool, own, blocks
        self._kv_cache = kv_cache
        self._cached = kv_cache.cached
        self._posted: SimpleQueue[Posted] = SimpleQueue()
        self._arrivals = 0
        self._model_fingerprint = self._cached.layout.fingerprint(info.weights_fingerprint)
        self._fast_path = FastPath(parts.fast_path)
        self._borrower_manager = BorrowerManager(
            kv_cache,
            self._transport_name,
            self._emit,
            self.post,
            own,
            self._fast_path,
            parts.others,
            read_silence_s=parts.limits.read_silence_s,
            grid=parts.grid,
        )
        self._lender_manager = LenderManager(
            kv_cache,
            self._borrower_manager,
            self._model_fingerprint,
            self._emit,
            self._fast_path,
            parts.limits.max_queued_loans,
            self._next_arrival,
            info,
        )
        self._connections = Connections(self._cached.pool, self._emit, self.post, ranks)
        self._cache_queries = CacheQueries(kv_cache.cached, self._model_fingerprint, self._emit, self.post)

    def _table_parts(self) -> TableParts:
        """Return the parts that the engine's requests use."""
        return TableParts(
            self._kv_cache,
            self._borrower_manager,
            self._model_fingerprint,
            self._info,
            self._emit,
            self._next_arrival,
            self._limits.reserve_output_tokens,
        )

    def _serve(self, requests: RequestTable[Any], drafts: DraftCounts | None = None) -> None:
        """Take the engine's requests and report on them."""
        limits = self._limits
        times = ReportSchedule(limits.report_interval_s, limits.min_report_interval_s, limits.max_step_s)
        self._requests = requests
        self._reports = LoadReporter(self._kv_cache, requests, self._lender_manager, times, self._emit, drafts)

    # ------------------------------------------------------------------ the loop's calls

    def start(self) -> Ready:
        """Register the pool and return the facts that the front announces."""
        transport, layout, info = self._parts.transport, self._cached.layout, self._info
        own = [] if transport is None or self._pool is None else [transport.register(self._pool)]
        endpoints = [*own, *(rank.endpoint for rank in self._parts.others)]
        endpoint = self._endpoint(endpoints[:: self._parts.grid.replicas if self._parts.grid else 1])
        self._fast_path.lends_from(endpoint)
        below = self._cached.shared
        return Ready(
            endpoint=endpoint,
            transport=self._transport_name,
            model_fingerprint=self._model_fingerprint,
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
            kv_heads=layout.kv_heads,
            num_blocks=self._cached.pool.num_blocks,
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_context_tokens,
            revision=info.revision or info.weights_fingerprint,
            adapters=info.adapters,
            store="" if below is None else below.store.identity,
            resumes_at_boundaries=self._kv_cache.resumes_at_boundaries,
            reads_media=info.reads_media,
            pooler=info.pooler,
        )

    def post(self, message: Posted) -> None:
        """Hand a message to the loop.

        From any thread.
        """
        self._posted.put(message)
        self._parts.wake()

    def handle_posted(self) -> None:
        """Handle messages that other threads posted, and fast-path announcements from other engines."""
        self._borrower_manager.handle_fast_path()
        while not self._posted.empty():  # only this method takes from it
            self.handle(self._posted.get_nowait())

    def close(self) -> None:
        """Stop all transfers; no transfer touches the pool afterwards."""
        if self._parts.transport is not None:
            self._parts.transport.close()
        self._cached.close()

    def report(self) -> None:
        """Report changes and load.

        A step that hangs silences the reports.
        """
        self._borrower_manager.give_up_stuck()
        self._cached.write_behind()
        self._cached.pins.expire()
        self._reports.report()

    def handle(self, message: Input) -> None:
        """Handle one message from the front or from another thread of this process."""
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
                self._set_budget(budget)
            case CorruptReads(num_blocks):
                if self._own is not None:
                    self._own.corruption = Corruption(self._blocks, num_blocks)
                else:
                    self._parts.others[0].corrupt(num_blocks)
            case StoreRemoved():
                self._cache_queries.removed(message)
            case InspectCache():
                self._cache_queries.answer(message)
            case Connect():
                self._fast_path.met(message.endpoint)
                self._connections.open(message)
            case ConnectionRead():
                self._connections.read_ended(message)
            case Audit(audit_id):
                self._emit(self.audit(audit_id))

    def audit(self, audit_id: int = 0) -> Audited:
        """Check the pool's records against every holder of a block."""
        pool, pins, fault = self._cached.pool, self._cached.pins, ""
        claims: list[Sequence[int]] = [sequence.blocks for sequence in self._requests.sequences]
        claims += [*self._lender_manager.holdings(), pins.blocks, *self._own_claims()]
        try:
            pool.check_integrity(claims)
            pins.check_integrity()
            reserving = [*self._requests.sequences, *self._lender_manager.started_jobs(), *self._kv_cache.lingering]
            reserved = sum(sequence.num_reserved for sequence in reserving) + self._requests.num_reserved
            assert reserved == pool.num_reserved, f"{pool.num_reserved} blocks are reserved, {reserved} expected"
        except AssertionError as error:
            fault = str(error) or "an invariant of the pool does not hold"
        return Audited(
            audit_id=audit_id,
            fault=fault,
            held_blocks=pool.num_held - pins.num_idle,
            reserved_blocks=pool.num_reserved,
            quarantined_blocks=pool.num_quarantined,
            sequences=self._requests.num_requests,
            loans=self._lender_manager.num_loans,
        )

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether no request and no loan is left, and no step runs."""

    @property
    def computes_loans(self) -> bool:
        """Whether a loan is not computed completely."""
        return bool(self._lender_manager.started_jobs())

    def drop_cache(self) -> None:
        """Forget every cached block that nobody holds."""
        pool = self._cached.pool
        pool.drop_idle(pool.idle_keys(pool.num_ids))

    # ------------------------------------------------------------------ parts

    @abstractmethod
    def _endpoint(self, ranks: Sequence[bytes]) -> bytes:
        """Return the endpoint of the whole pool, from those of all ranks' parts."""

    @abstractmethod
    def _own_claims(self) -> list[Sequence[int]]:
        """Return block lists that neither a sequence nor a loan holds."""

    def _set_budget(self, budget: StepBudget) -> None:
        self._limits = replace(self._limits, budget=budget)

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

    def _next_arrival(self) -> int:
        """Return the next number of the counter that orders requests and loans, arrivals and turns."""
        return self._take_arrivals(1)

    def _take_arrivals(self, count: int) -> int:
        self._arrivals += count
        return self._arrivals - count + 1
