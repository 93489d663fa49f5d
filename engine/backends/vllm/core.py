"""Core of a vLLM engine: vLLM's EngineCore between Tandem's loans and Tandem's messages.

One thread drives it; only `post` and `unblock` may be called from other threads. `schedule` gives the next batch, also
while earlier ones are computed, and `end_step` takes the results in the same order. vLLM's scheduler and block pool are
used by the driving thread alone.

A batch in flight does not delay messages: loans land, requests come and go. What a step still writes is not reused
meanwhile, because vLLM defers freeing it (with several batches in flight) or Tandem ends requests after the step.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.vllm.kv.block_pool import GroupPlace
from engine.backends.vllm.kv.cache import VllmKVCache
from engine.backends.vllm.kv.memory import KvMemory, VllmKvMemory
from engine.backends.vllm.media.features import Media
from engine.backends.vllm.requests import VllmRequests
from engine.backends.vllm.sampling.native_sampling import Sampling
from engine.backends.vllm.submitted import Full, Submissions, Submitted
from engine.core.loan_host import EngineParts, LoanHost
from engine.core_types import EngineSequence
from engine.messages.to_engine import ItemsFetched, ToEngine
from engine.model_runner import ModelInfo
from kvcache.chain import Chain
from kvcache.store.kv_store import KvStore
from kvtransfer.ranks import join_endpoints, with_planes, with_stages
from loans.reads.block_reads import LocalRank

Fingerprint = Callable[[Sequence[int]], NDArray[np.uint64]]
FingerprintLater = Callable[[Any, Callable[[], NDArray[np.uint64]]], None]
"""Callable later(tag, compute) that computes fingerprints on another thread; `VllmCore.name` takes tag and result."""


class Filled:
    """Blocks that one step filled, held until they are named."""

    def __init__(self, full: Sequence[Full], places: Sequence[GroupPlace]) -> None:
        self.full, self.places = full, places
        self.blocks = [each.block for each in places]


class VllmCore(LoanHost):
    """The engine without threads and sockets."""

    requests: VllmRequests
    kv_cache: VllmKVCache

    def __init__(
        self,
        parts: EngineParts,
        engine: Any,
        memory: KvMemory,
        block_pool: Any,
        info: ModelInfo,
        sampling: Sampling,
        lora: Mapping[bytes, Any],
        stores: Sequence[KvStore] = (),
        fingerprint_later: FingerprintLater | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the core.

        `engine` is vLLM's EngineCore and `block_pool` its BlockPool. `lora` has vLLM's LoRARequest of each adapter, by
        the adapter's fingerprint. Without `fingerprint_later` the loop computes fingerprints itself, between steps.
        `clock` returns seconds.
        """
        self._engine = engine
        self._scheduler = engine.scheduler
        self._memory = memory
        self._own_budget = engine.scheduler.max_num_scheduled_tokens
        self._fingerprint_later = fingerprint_later
        self.unnamed: dict[Filled, None] = {}
        """Blocks of steps whose fingerprints are being computed, in order."""
        self._blocked = False
        """Whether the last schedule was empty, and nothing has happened since."""
        self._is_unblocked = False
        """Whether vLLM could schedule more than before; set on any thread."""
        groups = memory.layout.groups
        assert groups is not None
        lookahead = int(engine.vllm_config.num_prefill_lookahead_tokens)
        sampling.num_beyond = max(lookahead, 0 if groups.is_chain else 1)
        kv_cache = VllmKVCache(memory, block_pool, groups, clock, self._finished, stores)
        own = None  # where other processes have all KV memory
        if isinstance(memory, VllmKvMemory) and parts.transport is not None:
            own = LocalRank(parts.transport, memory.part, memory.part_fingerprints)
        super().__init__(parts, info, memory.pool, own, kv_cache, memory)
        self._media = Media(self._scheduler, self._emit, info.encoder_fingerprint)
        self.submissions = Submissions(
            self._scheduler, kv_cache, sampling, lora, self._media, self._on_scheduled, self.unblock
        )
        requests = VllmRequests(
            self._table_parts(), self.submissions, sampling, self._media, lambda: bool(self.unnamed)
        )
        self._serve(requests, requests if self._scheduler.num_spec_tokens else None)

    def unblock(self) -> None:
        """Schedule again although no message came.

        From any thread.
        """
        self._is_unblocked = True
        self._parts.wake()

    def handle_posted(self) -> None:
        if self._is_unblocked:
            self._is_unblocked = self._blocked = False
        super().handle_posted()

    def on_news(self) -> None:
        self._blocked = False

    def handle(self, message: ToEngine) -> None:
        self._blocked = False
        if isinstance(message, ItemsFetched):
            self._items_fetched(message)
        else:
            super().handle(message)

    def close(self) -> None:
        super().close()
        self._engine.shutdown()

    # ------------------------------------------------------------------ steps

    @property
    def idle(self) -> bool:
        if self.kv_cache.in_step or self.unnamed or self._scheduler.has_requests():
            return False
        return not (self.requests.num_requests or self.lender_manager.num_loans)

    @property
    def may_schedule(self) -> bool:
        """Whether `schedule` could return a batch."""
        return not self._blocked and bool(self._scheduler.has_requests())

    def take_jobs(self) -> None:
        """Let vLLM compute what loans lack, so that `may_schedule` covers it."""
        if self.lender_manager.num_loans:
            self.loans.start_queued()
            self._submit_jobs()

    def schedule(self) -> Any:
        """Return vLLM's next SchedulerOutput; None when there is nothing to do.

        It may be empty but for requests to forget. vLLM must see the outcome of each, also of an empty one.
        """
        self.take_jobs()
        if self._blocked or not self._scheduler.has_requests():
            return None
        budget = self._limits.budget
        per_stream, num_streams = 1, len(self._scheduler.running)
        if num_drafts := self._scheduler.num_spec_tokens:
            # vLLM starts a cached prompt with room for drafts, or not at all
            per_stream, num_streams = 1 + num_drafts, num_streams + 1
        most = budget.max_prefill_tokens + num_streams * per_stream
        wanted = max(budget.max_tokens, per_stream)
        if self._scheduler.scheduler_config.enable_chunked_prefill:  # else a prompt is one step
            self._scheduler.max_num_scheduled_tokens = min(self._own_budget, wanted, most)
        num_running = len(self._scheduler.running)
        if len(self.cached.pins):
            self.cached.pins.shrink(self.submissions.num_lacking())
        output = self._scheduler.schedule()
        self.submissions.after_schedule(output)
        # A request that has preempted itself ends vLLM's look at the others, which the next one finds able to go on.
        is_empty = not output.total_num_scheduled_tokens and not output.finished_req_ids
        self._blocked = is_empty and len(self._scheduler.running) == num_running
        self._give_up_lost()
        if self._blocked:
            self._reports.changed = True
        if not self.kv_cache.in_step:
            self._reports.step_began(self.cached.clock())
        self.kv_cache.num_steps += 1
        return output

    def grammar_of(self, output: Any) -> Any:
        """Return vLLM's GrammarOutput for a batch, whose sequences' tokens are all known; None without any grammar."""
        return self._scheduler.get_grammar_bitmask(output)

    def deferred_grammar_of(self, output: Any) -> Any:
        """Return the same for a batch that was launched before its tokens and drafts were known."""
        if self._engine.check_for_draft_tokens:
            drafts = self._engine.model_executor.take_draft_token_ids()
            if drafts is not None:  # those that do not match a grammar leave the batch
                self._scheduler.update_draft_token_ids_in_output(drafts, output)
        return self.grammar_of(output)

    def end_step(self, output: Any, computed: Any) -> None:
        """Process the executor's result of the oldest batch in flight."""
        seconds = self._reports.step_ended()
        num_requests = self.requests.num_requests
        drafts, counts = output.scheduled_spec_decode_tokens, output.num_scheduled_tokens
        if output.total_num_scheduled_tokens > len(counts):  # else every request has one token
            if drafts:
                counts = {each: count - len(drafts.get(each, ())) for each, count in counts.items()}
            if prompt_tokens := sum(count for count in counts.values() if count > 1):
                self._reports.changed = True
                self.cached.speeds.computed(prompt_tokens, seconds)
        self.submissions.abort_removed()
        outputs = self._scheduler.update_from_output(output, computed)
        self._engine.post_step(output.total_num_scheduled_tokens > 0)  # takes the next drafts, unless asynchronous
        self.kv_cache.num_steps -= 1
        if self.kv_cache.in_step:
            self._reports.step_began(self.cached.clock())
        if output.total_num_scheduled_tokens:
            self._blocked = False
        self._take_full(self.submissions.filled(output))
        for of_client in outputs.values():
            self.requests.produced(of_client.outputs, drafts, output.num_invalid_spec_tokens or {})
        self._reports.changed |= self.requests.num_requests != num_requests
        self.loans.start_queued()
        self._submit_jobs()

    def name(self, filled: Filled, fingerprints: NDArray[np.uint64]) -> None:
        """Name the blocks that a step filled, lend them, and let them go."""
        del self.unnamed[filled]
        self._named(filled, fingerprints)
        self.kv_cache.pool.release(filled.blocks)
        self._blocked = False
        if not self.unnamed:
            self.requests.all_named()

    # ------------------------------------------------------------------ parts

    def _endpoint(self, ranks: Sequence[bytes]) -> bytes:
        memory = self._memory
        return with_stages(with_planes(join_endpoints(ranks), memory.layout.planes, memory.num_blocks), memory.shares)

    def _own_claims(self) -> list[Sequence[int]]:
        """Return the blocks that vLLM's requests hold, those allocated early, and those not named yet."""
        unnamed = [filled.blocks for filled in self.unnamed]
        return [*self.submissions.holdings(), *self.kv_cache.allocated, *unnamed]

    def _take_full(self, full: Sequence[Full]) -> None:
        """Name the blocks that a step filled, once their fingerprints are known.

        Steps do not wait for fingerprints that another thread computes: the blocks are held meanwhile.
        """
        if not full:
            return
        pool = self.kv_cache.pool
        places = [
            place for each in full for place in each.places if not pool.has_name(place.parent, place.key, place.block)
        ]
        filled = Filled(full, places)
        if self._fingerprint_later is None or not (places or self.unnamed):
            self._named(filled, self._fingerprints_of(filled))
            return
        self.kv_cache.pool.acquire(filled.blocks)
        self.unnamed[filled] = None
        self._fingerprint_later(filled, lambda: self._fingerprints_of(filled))

    def _fingerprints_of(self, filled: Filled) -> NDArray[np.uint64]:
        """Return fingerprints of the blocks that have no name, [blocks, KV heads].

        From any thread.
        """
        return self.cached.compute_fingerprints(filled.blocks) if filled.blocks else np.empty((0, 0), np.uint64)

    def _named(self, filled: Filled, fingerprints: NDArray[np.uint64]) -> None:
        self.kv_cache.name(filled.places, fingerprints)
        for each in filled.full:
            sequence, end = each.submitted.sequence, each.end * self.kv_cache.groups.unit
            if self.submissions.get(each.submitted.request_id) is not each.submitted:
                continue
            # after a preemption the first ones may be known
            is_known = max(0, len(sequence.keys) + len(each.places) - each.end) if self.kv_cache.groups.is_chain else 0
            new = each.places[is_known:]
            sequence.keys += [place.key for place in new]
            if sequence.sampling is None:
                sequence.num_computed = max(sequence.num_computed, end)
                names, blocks = [place.key for place in new], [place.block for place in new]
                self.lender_manager.computed(sequence, names, blocks)
            else:
                self.requests.named(sequence, end)

    def _submit_jobs(self) -> None:
        """Let vLLM compute what loans lack."""
        for job in self.lender_manager.jobs():
            if job not in self.submissions:
                try:
                    self.submissions.add(job, self.kv_cache.layout.blocks_for(job.num_tokens_with_items))
                except ValueError as error:
                    self._give_up(job, str(error))
                if job in self.submissions:  # else it waits for blobs
                    self._blocked = False

    def _items_fetched(self, message: ItemsFetched) -> None:
        """Let vLLM compute a sequence whose items' blobs have come, or end it where they cannot be had."""
        if (waiting := self._media.fetched(message)) is None:
            return
        failure = message.failure
        if not failure:
            try:
                self.submissions.add(*waiting)
            except ValueError as error:
                failure = str(error)
        if failure:
            self._give_up(waiting[0], failure)

    def _give_up_lost(self) -> None:
        """End the sequences for which vLLM's encoder would need blobs that are not here any more."""
        for request_id in self._media.take_lost():
            if (submitted := self.submissions.get(request_id)) is not None:
                self._give_up(submitted.sequence, "its blocks were given away, and the tensors of an item are not here")

    def _give_up(self, sequence: EngineSequence, reason: str) -> None:
        """End what cannot be computed here: a loan's borrower computes itself, a request is placed again."""
        if sequence.sampling is None:
            self.lender_manager.lose(sequence, reason)
        else:
            self.requests.give_up(sequence, reason)

    def _on_scheduled(self, submitted: Submitted, num_hits: int) -> None:
        if submitted.sequence.sampling is not None:
            self.requests.scheduled(submitted, num_hits)

    def _finished(self, sequence: Chain) -> None:
        self._blocked = False
        assert isinstance(sequence, EngineSequence)
        self.submissions.remove(sequence)
