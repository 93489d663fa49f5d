"""The engine core: one step loop over requests, loans taken and loans given.

One thread drives it by `handle`, `handle_posted`, and `step` or its two halves; only `post` may be called from other
threads. Between the halves the runner computes on a thread of its own while messages are still handled, so a handshake
does not wait for steps.

The scheduler: which tokens one step computes.

Pure: the same sequences and budget give the same batch.

Decoding sequences come first, then prompts (and preempted sequences to be computed again), each by priority and
arrival. That order alone would starve low priorities, or prompts while decoding sequences fill the budget. So every
step has a guaranteed share, `StepBudget.guaranteed_tokens`, for the sequence that has waited longest for its next
token. That is the one with the lowest `turn`, a number drawn from a rising counter whenever a sequence starts or
restarts with its blocks, gets a token, or is forked from.

The bound: a runnable sequence that stays runnable gets its next token within

    sum over itself and those of a lower turn of ceil(num_remaining / guaranteed_tokens)   steps.

A sequence that joins later has a higher turn. The one with the lowest turn gets the share at every step until its token
(a loan's job: until its end), and then it has a higher turn, or is gone. `max_wait_steps` bounds the sum by the size of
the pool: every token left to compute has a slot in a block that only its own sequence holds or has reserved.

Where priorities are equal the share changes nothing while decoding sequences leave room for it: the prompt that has
waited longest is the first in order as well.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from engine.core.load_reports import LoadReporter
from engine.core.loan_host import EngineLimits, EngineParts, LoanHost
from engine.core.request_manager import RequestManager
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


def schedule(runnable: Iterable[EngineSequence], budget: StepBudget) -> list[Chunk]:
    """Return the batch: every decoding sequence, then prompts by priority and arrival within the budget.

    The share of the sequence that has waited longest comes before both. Sequences beyond the budget wait a step. The
    caller provides the blocks.
    """
    sequences = list(runnable)
    if not sequences:
        return []
    decoding = [sequence.decoding for sequence in sequences]
    if all(decoding) and len(sequences) <= budget.max_tokens:  # one token each: the common case
        sequences.sort(key=_rank)
        return [Chunk(sequence, sequence.num_computed, 1) for sequence in sequences]
    ordered = sorted(
        (not decodes, *_rank(sequence), place, sequence.num_remaining, sequence)
        for place, (sequence, decodes) in enumerate(zip(sequences, decoding, strict=True))
    )
    *_, longest = min(ordered, key=lambda entry: (entry[-1].turn, entry[-1].arrival))
    share = min(longest.num_remaining, budget.guaranteed_tokens)
    left = budget.max_tokens - share
    prefill_left = budget.max_prefill_tokens - (0 if longest.decoding else share)
    chunks: list[Chunk] = []
    for is_prompt, _, _, _, remaining, sequence in ordered:
        own_share = share if sequence is longest else 0
        count = min(remaining - own_share, left)
        if is_prompt:
            count = min(count, prefill_left)
            prefill_left -= count
        left -= count
        if count + own_share:
            chunks.append(Chunk(sequence, sequence.num_computed, count + own_share))
    return chunks


def _rank(sequence: EngineSequence) -> tuple[int, int]:
    return -sequence.priority, sequence.arrival


def max_wait_steps(budget: StepBudget, num_blocks: int, block_tokens: int) -> int:
    """Return the steps within which a runnable sequence gets its next token, whatever a pool of `num_blocks` holds."""
    return num_blocks + num_blocks * block_tokens // budget.guaranteed_tokens


class EngineCore(LoanHost):
    """The engine without threads and sockets."""

    requests: RequestManager
    kv_cache: KVCacheManager
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
            self.kv_cache, self.requests, self.lender_manager, self._reports, limits.budget, self._take_arrivals
        )

    @property
    def busy(self) -> bool:
        """Whether there is something to compute and no step runs, so the loop should not wait for messages."""
        return not self.kv_cache.in_step and bool(self.runnable() or self.requests.running_set.forkable)

    @property
    def idle(self) -> bool:
        return not (self.kv_cache.in_step or self.requests.num_requests or self.lender_manager.num_loans)

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
        if not self.requests.num_requests and not self.lender_manager.num_loans:
            return []
        self.requests.running_set.begin_step()
        self.requests.part()
        self.loans.start_queued()
        batch = self._batch_with_room()
        self.requests.finish_filled()
        now = self.cached.clock()
        self._reports.step_began(now)
        for chunk in batch:
            sequence = chunk.sequence
            if sequence.hedged:
                self.borrower_manager.claim(sequence, chunk.end)
            self.kv_cache.grow(sequence, chunk.end)
            # loan ids are separate and may equal a request's id; decoding sequences were recorded before
            if sequence.sampling is not None and not sequence.decoding:
                self.requests.computing(sequence, now)
        self.kv_cache.begin_step(chunk.sequence for chunk in batch)
        return batch

    def end_step(self, batch: list[Chunk], sampled: list[SampleResult]) -> None:
        """Process the runner's results of the batch from `begin_step`."""
        prompts = [chunk for chunk in batch if not chunk.sequence.decoding]
        seconds = self._reports.step_ended()
        if prompts:
            self._reports.changed = True
            self.cached.speeds.computed(sum(chunk.count for chunk in prompts), seconds)
        over = set(self.kv_cache.lingering)
        self.kv_cache.end_step()
        tokens = iter(sampled)
        num_requests = self.requests.num_requests
        results = [(chunk, next(tokens) if chunk.answers else None) for chunk in batch]
        if prompts:  # first tokens leave first: clients wait for them more than for the next token of a stream
            results.sort(key=lambda result: result[0].sequence.decoding)
        for chunk, token in results:
            sequence = chunk.sequence
            if sequence in over or (sequence.sampling is not None and not self.requests.has(sequence)):
                continue  # cancelled meanwhile, or another choice of the request failed just now
            full = self.kv_cache.advance(sequence, chunk.count)
            if sequence.hedged:
                self.borrower_manager.computed(sequence)
            if sequence.sampling is None:
                self.lender_manager.computed(sequence, sequence.keys[len(sequence.keys) - len(full) :], full)
            elif token is not None:
                self.requests.computed(sequence, token, chunk.samples)
        self.requests.send_tokens()
        self.requests.part()
        # use the blocks that the batch gave back: the loop may sleep before the next step
        self.requests.running_set.restart()
        self.requests.finish_filled()
        self._reports.changed |= self.requests.num_requests != num_requests
        self.loans.start_queued()

    # ------------------------------------------------------------------ the loop's parts

    def _endpoint(self, ranks: Sequence[bytes]) -> bytes:
        return join_endpoints(ranks)

    def _own_claims(self) -> list[Sequence[int]]:
        return [sequence.blocks for sequence in self.kv_cache.lingering]

    def _set_budget(self, budget: StepBudget) -> None:
        super()._set_budget(budget)
        self.uniform_decode.budget = budget

    def _batch_with_room(self) -> list[Chunk]:
        """Return the next batch with reservations for all its blocks, preempting requests until they fit."""
        while True:
            batch = schedule(self.runnable(), self._limits.budget)
            if self.requests.adopt(batch):
                continue
            if self.requests.running_set.make_room(batch):
                return batch

    def runnable(self) -> list[EngineSequence]:
        """Return the sequences that the next step may compute."""
        return self.requests.running_set.running + self.lender_manager.jobs()
