"""Part of an engine core that does not depend on how the engine steps: messages, loans, reports and the audit.

`engine/core/engine_core.py` (Tandem's own scheduler) and `engine/backends/vllm/core.py` (vLLM's) are its subclasses.
One thread drives a core; only `post` may be called from other threads.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.core.cache_queries import CacheQueries
from engine.core.load_reports import DraftCounts, LoadReporter, ReportSchedule
from engine.core.request_table import RequestTable, TableParts
from engine.core_types import EngineSequence, StepBudget
from engine.messages.from_engine import Audited, Connected, FromEngine, Ready
from engine.messages.to_engine import (
    Audit,
    Cancel,
    ConnectPeers,
    CorruptReads,
    CutOffPeer,
    DelayLoans,
    DrainLoans,
    EndLoans,
    Generate,
    InspectCache,
    SetBudget,
    TakeSnapshot,
    ToEngine,
)
from engine.model_runner import ModelInfo
from kvcache.cached_blocks import BlockMemory
from kvcache.kv_view import KvView
from kvtransfer.ranks import RankGrid
from kvtransfer.transport import AnyPool, Transport
from loans.component import HostCalls, Loans, Ranks
from loans.lender_manager import LenderLimits, LenderManager
from loans.network import LoanGiven, LoanNetwork, NoNetwork, Want
from loans.reads.block_reads import LocalRank, RemoteRank
from loans.reads.verification import Corruption

log = logging.getLogger(__name__)


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
    network: LoanNetwork = field(default_factory=NoNetwork)
    """The way to other engines."""
    others: Sequence[RemoteRank] = ()
    """Other ranks of the engine, each with as many blocks of the same numbers."""
    grid: RankGrid | None = None
    """Parts of every block that all ranks hold; None: each has some heads."""


class LoanHost(ABC):
    """An engine core without its steps."""

    requests: RequestTable[Any]

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
        self._transport_name = parts.transport.name if parts.transport is not None else parts.others[0].transport
        self._parts, self._limits, self._emit = parts, parts.limits, parts.emit
        self._info, self._pool, self.own_rank, self._blocks = info, pool, own, blocks
        self.kv_cache = kv_cache
        self.cached = kv_cache.cached
        self._arrivals = 0
        self.model_fingerprint = self.cached.layout.fingerprint(info.weights_fingerprint)
        """Fingerprint of weights, layout and dtype, from which the roots of chains are made."""
        lending = LenderLimits(
            parts.limits.max_queued_loans, info.vocab_size, info.adapter_fingerprints, info.reads_media
        )
        self.loans = Loans[LenderManager[EngineSequence]](
            kv_cache,
            Ranks(own, parts.others, parts.grid),
            self._transport_name,
            parts.network,
            HostCalls(
                self._next_arrival,
                lambda: self.requests.running_set.short,
                lambda mark: self._reports.saw(mark),
                parts.wake,
            ),
            lambda borrower: LenderManager(kv_cache, borrower, lending, self._next_arrival, EngineSequence),
            parts.limits.read_silence_s,
        )
        self.borrower_manager, self.lender_manager = self.loans.borrower, self.loans.lender
        self._cache_queries = CacheQueries(kv_cache.cached, self.model_fingerprint, self._emit, self.loans.post)

    def _table_parts(self) -> TableParts:
        """Return the parts that the engine's requests use."""
        return TableParts(
            self.kv_cache,
            self.borrower_manager,
            self.model_fingerprint,
            self._info,
            self._emit,
            self._next_arrival,
            self._limits.reserve_output_tokens,
        )

    def _serve(self, requests: RequestTable[Any], drafts: DraftCounts | None = None) -> None:
        """Take the engine's requests and report on them."""
        limits = self._limits
        times = ReportSchedule(limits.report_interval_s, limits.min_report_interval_s, limits.max_step_s)
        self.requests = requests
        self._reports = LoadReporter(self.kv_cache, requests, self.lender_manager, times, self._emit, drafts)

    # ------------------------------------------------------------------ the loop's calls

    def start(self) -> Ready:
        """Register the pool and return the facts that the front announces."""
        transport, layout, info = self._parts.transport, self.cached.layout, self._info
        own = [] if transport is None or self._pool is None else [transport.register(self._pool)]
        endpoints = [*own, *(rank.endpoint for rank in self._parts.others)]
        endpoint = self._endpoint(endpoints[:: self._parts.grid.replicas if self._parts.grid else 1])
        below = self.cached.shared
        return Ready(
            endpoint=endpoint,
            transport=self._transport_name,
            model_fingerprint=self.model_fingerprint,
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
            kv_heads=layout.kv_heads,
            num_blocks=self.cached.pool.num_blocks,
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_context_tokens,
            revision=info.revision or info.weights_fingerprint,
            adapters=info.adapters,
            store="" if below is None else below.store.identity,
            resumes_at_boundaries=self.kv_cache.resumes_at_boundaries,
            reads_media=info.reads_media,
            pooler=info.pooler,
            loan_address=self.loans.start(self.model_fingerprint, endpoint),
        )

    def handle_posted(self) -> None:
        """Handle what other threads and other engines sent."""
        if self.loans.turn():
            self._reports.changed = True
            self.on_news()

    def on_news(self) -> None:  # noqa: B027 - most engines look for work in every turn
        """Process that loans have changed, so that there may be something to compute."""

    def lend(self, loan: LoanGiven, want: Want) -> None:
        """Give a loan that came past the network."""
        self.loans.opened(loan, want)

    def end_loan(self, loan: LoanGiven) -> None:
        """End a loan that came past the network."""
        self.loans.closed(loan)

    def flush(self) -> None:
        """Send what was said to other engines."""
        self.loans.flush()

    def close(self) -> None:
        """End all loans, and stop all transfers; no transfer touches the pool afterwards."""
        self.loans.close()
        if self._parts.transport is not None:
            self._parts.transport.close()
        self.cached.close()

    def report(self) -> None:
        """Report changes and load.

        A step that hangs silences the reports.
        """
        num_loans = self.borrower_manager.num_loans
        self.loans.report(is_alive=not self._reports.is_step_stuck)
        if self.borrower_manager.num_loans != num_loans:
            self.on_news()
        self.cached.write_behind()
        self.cached.pins.expire()
        self._reports.report()

    def handle(self, message: ToEngine) -> None:
        """Handle one message from the front."""
        self._reports.changed = True
        match message:
            case Generate():
                self._reports.saw(message.mark)
                self.requests.admit(message)
            case Cancel(request_id, choice):
                self.requests.cancel(request_id, choice)
            case TakeSnapshot():
                self._reports.send_snapshot()
            case SetBudget(budget):
                self._set_budget(budget)
            case CorruptReads(num_blocks):
                if self.own_rank is not None:
                    self.own_rank.corruption = Corruption(self._blocks, num_blocks)
                else:
                    self._parts.others[0].corrupt(num_blocks)
            case InspectCache():
                self._cache_queries.answer(message)
            case ConnectPeers(query_id, peers):
                self.loans.connections.open(peers, lambda failures: self._emit(Connected(query_id, tuple(failures))))
            case DrainLoans(is_draining):
                self.lender_manager.is_draining = is_draining
            case EndLoans():
                self.lender_manager.end_all()
            case CutOffPeer(worker_id, seconds):
                self.loans.cut_off(worker_id, seconds)
            case DelayLoans(delay_s, seconds):
                self.loans.delay(delay_s, seconds)
            case Audit(audit_id):
                self._emit(self.audit(audit_id))

    def audit(self, audit_id: int = 0) -> Audited:
        """Check the pool's records against every holder of a block."""
        pool, pins, fault = self.cached.pool, self.cached.pins, ""
        claims: list[Sequence[int]] = [sequence.blocks for sequence in self.requests.sequences]
        claims += [*self.lender_manager.holdings(), pins.blocks, *self._own_claims()]
        try:
            pool.check_integrity(claims)
            pins.check_integrity()
            reserving = [*self.requests.sequences, *self.lender_manager.started_jobs(), *self.kv_cache.lingering]
            reserved = sum(sequence.num_reserved for sequence in reserving) + self.requests.num_reserved
            assert reserved == pool.num_reserved, f"{pool.num_reserved} blocks are reserved, {reserved} expected"
        except AssertionError as error:
            fault = str(error) or "an invariant of the pool does not hold"
        return Audited(
            audit_id=audit_id,
            fault=fault,
            held_blocks=pool.num_held - pins.num_idle,
            reserved_blocks=pool.num_reserved,
            quarantined_blocks=pool.num_quarantined,
            sequences=self.requests.num_requests,
            loans=self.lender_manager.num_loans,
        )

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether no request and no loan is left, and no step runs."""

    @property
    def computes_loans(self) -> bool:
        """Whether a loan is not computed completely."""
        return bool(self.lender_manager.started_jobs())

    def drop_cache(self) -> None:
        """Forget every cached block that nobody holds."""
        pool = self.cached.pool
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

    def _next_arrival(self) -> int:
        """Return the next number of the counter that orders requests and loans, arrivals and turns."""
        return self._take_arrivals(1)

    def _take_arrivals(self, count: int) -> int:
        self._arrivals += count
        return self._arrivals - count + 1
