"""The engine core: one step loop over requests, loans taken and loans given.

One thread drives it by `handle`, `handle_posted`, and `step` or its two halves; only `post` may be called from other
threads. Between the halves the runner computes on a thread of its own while messages are still handled, so a handshake
does not wait for steps.
"""

import time
from collections.abc import Callable, Sequence

from engine.core.load_reports import LoadReporter
from engine.core.loan_host import EngineLimits, EngineParts, LoanHost
from engine.core.request_manager import RequestManager
from engine.core.scheduler import schedule
from engine.core.uniform_decode import UniformDecode
from engine.core_types import Chunk, EngineSequence, SampleResult, StepBudget
from engine.messages.from_engine import FromEngine
from engine.model_runner import ModelRunner
from kvcache.block_pool import BlockPool
from kvcache.cached_blocks import CachedBlocks, StoreBelow
from kvcache.kv_cache_manager import KVCacheManager
from kvcache.store.kv_store import KvStore
from kvtransfer.ranks import BlockPart, join_endpoints
from kvtransfer.transport import Transport
from loans.network import LoanNetwork, NoNetwork
from loans.reads.block_reads import LocalRank, RemoteRank


class EngineCore(LoanHost):
    """The engine without threads and sockets."""

    _requests: RequestManager
    _kv_cache: KVCacheManager
    _reports: LoadReporter

    def __init__(
        self,
        runner: ModelRunner,
        transport: Transport,
        limits: EngineLimits,
        emit: Callable[[FromEngine], None],
        wake: Callable[[], None] = lambda: None,
        stores: Sequence[KvStore] = (),
        clock: Callable[[], float] = time.monotonic,
        others: Sequence[RemoteRank] = (),
        network: LoanNetwork | None = None,
    ) -> None:
        """Create the engine; `EngineParts` describes the arguments that are not here.

        `clock` returns seconds. Evicted blocks go to the `stores`. `runner` computes on all ranks.
        """
        self._runner = runner
        part = BlockPart(runner.layout.block_bytes, 0, 1 + len(others))
        pool = BlockPool(runner.pool.num_blocks)
        cached = CachedBlocks(pool, runner.layout, runner, clock, [StoreBelow(store) for store in stores])
        super().__init__(
            EngineParts(transport, limits, emit, wake, network or NoNetwork(), others),
            runner.info,
            runner.pool,
            LocalRank(transport, part, runner.part_fingerprints, runner.folding, clock),
            KVCacheManager(cached, pool),
            runner,
        )
        self._serve(RequestManager(self._table_parts(), runner.copy_block))
        self.uniform_decode = UniformDecode(
            self._kv_cache, self._requests, self._lender_manager, self._reports, limits.budget, self._take_arrivals
        )

    @property
    def busy(self) -> bool:
        """Whether there is something to compute and no step runs, so the loop should not wait for messages."""
        return not self._kv_cache.in_step and bool(self._runnable() or self._requests.running_set.forkable)

    @property
    def idle(self) -> bool:
        return not (self._kv_cache.in_step or self._requests.num_requests or self._lender_manager.num_loans)

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
        self._loans.start_queued()
        batch = self._batch_with_room()
        self._requests.finish_filled()
        now = self._cached.clock()
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
            self._cached.speeds.computed(sum(chunk.count for chunk in prompts), seconds)
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
                self._lender_manager.computed(sequence, sequence.keys[len(sequence.keys) - len(full) :], full)
            elif token is not None:
                self._requests.computed(sequence, token, chunk.samples)
        self._requests.send_tokens()
        self._requests.part()
        # use the blocks that the batch gave back: the loop may sleep before the next step
        self._requests.running_set.restart()
        self._requests.finish_filled()
        self._reports.changed |= self._requests.num_requests != num_requests
        self._loans.start_queued()

    # ------------------------------------------------------------------ the loop's parts

    def _endpoint(self, ranks: Sequence[bytes]) -> bytes:
        return join_endpoints(ranks)

    def _own_claims(self) -> list[Sequence[int]]:
        return [sequence.blocks for sequence in self._kv_cache.lingering]

    def _set_budget(self, budget: StepBudget) -> None:
        super()._set_budget(budget)
        self.uniform_decode.budget = budget

    def _batch_with_room(self) -> list[Chunk]:
        """Return the next batch with reservations for all its blocks, preempting requests until they fit."""
        while True:
            batch = schedule(self._runnable(), self._limits.budget)
            if self._requests.adopt(batch):
                continue
            if self._requests.running_set.make_room(batch):
                return batch

    def _runnable(self) -> list[EngineSequence]:
        return self._requests.running_set.running + self._lender_manager.jobs()
