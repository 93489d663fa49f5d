"""Requests of an engine: admitted or rejected at once, borrowing or running, until they finish.

    admitted ──no loan──────────────▶ running ──▶ finished
        └──borrowing──loan is over──────┘ │ ▲
                                          │ └──blocks for all its tokens──┐
                                          └──a sequence lacks a block──▶ preempted
    (a cancel ends any of them; a request that does not fit now is rejected, never queued: the router waits)

A borrowing or running request holds blocks, and a reservation of those it was admitted with and has not taken yet. A
preempted request holds none. It restarts with all its tokens, computes in chunks those that the prefix cache has lost,
and continues after the last one. Its output is unchanged, since sampling is keyed by (seed, choice, position), and
emitted tokens are not emitted again. Victims are chosen while no step runs, in `begin_step`;
`engine/core/running_set.py` has the policy.

This describes one sequence. A request of several choices is admitted and borrows as one, its lead; then each choice
runs and finishes by itself (`engine/sampling/parallel_sampling.py`), and the request is over with the last one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.core.request_table import Request, RequestTable, TableParts
from engine.core.running_set import RunningSet
from engine.core_types import Chunk, EngineSequence, FinishReason, SampleResult
from engine.messages.from_engine import Embedded, PromptScored, Token
from engine.messages.to_engine import Generate
from kvcache.block_keys import BlockKey
from kvcache.kv_cache_manager import KVCacheManager
from loans.account import KvAccount


@dataclass(slots=True)
class _Request(Request):
    num_choices: int
    """Number of choices wanted."""
    num_preemptions_over: int = 0
    """Preemptions of sequences that are over."""
    num_recomputed_over: int = 0
    pooled: NDArray[np.float32] | None = None
    """Sum of the hidden states pooled so far."""

    @property
    def is_parted(self) -> bool:
        """Whether its sequences are forked from each other, now or later."""
        return self.num_choices > 1

    def count_preemptions(self) -> bool:
        """Update the account's preemptions; return False when nothing changed."""
        before = self.account.preemptions
        chains = self.chains.values()
        self.account.preemptions = self.num_preemptions_over + sum(s.num_preemptions for s in chains)
        self.account.recomputed_tokens = self.num_recomputed_over + sum(s.num_recomputed for s in chains)
        return self.account.preemptions > before


class RequestManager(RequestTable[_Request]):
    """Requests by id, and the loans taken for them."""

    running_set: RunningSet
    _kv_cache: KVCacheManager

    def __init__(self, parts: TableParts, copy_block: Callable[[int, int], None]) -> None:
        """Create the manager; `copy_block(source, target)` is called between steps."""
        super().__init__(parts)
        self.running_set = RunningSet(self._kv_cache, parts.reserve_output_tokens, parts.next_arrival, copy_block)
        self._num_parted = 0
        """Number of requests with forked sequences."""
        self._filling: dict[EngineSequence, None] = {}
        """Sequences of requests without output."""

    def _request(self, message: Generate, chains: list[EngineSequence]) -> _Request:
        by_choice = {chain.choice: chain for chain in chains}
        return _Request(by_choice, KvAccount(), message.to_store, message.retention, message.sampling.n)

    def _start(self, request: _Request, chains: list[EngineSequence], keys: list[BlockKey]) -> str:
        if self.running_set.admit(chains[0], keys):
            return ""
        needed, available = self.running_set.num_blocks_to_reserve(chains[0]), self._kv_cache.pool.num_available
        reason = f"{needed} KV blocks needed, {available} available now"
        if waiting := len(self.running_set.preempted):
            reason += f", {waiting} preempted requests wait for some"
        return reason

    def _admitted(self, request: _Request, lead: EngineSequence) -> None:
        self._num_parted += request.is_parted
        if lead.only_fills:
            self._filling[lead] = None

    def adopt(self, batch: list[Chunk]) -> bool:
        """Give starting sequences the blocks cached by now, so siblings that arrived together compute once.

        Returns True when the batch has to be made again.
        """
        adopted = 0
        for chunk in batch:
            sequence = chunk.sequence
            if sequence.sampling is None or sequence.decoding or sequence.num_preemptions or sequence.hedged:
                continue
            account = self.by_id[sequence.request_id].account
            if "compute_started" not in account.times:
                num_hits = self._kv_cache.adopt(sequence)
                self._count_hits(sequence, num_hits)
                adopted += num_hits
        return adopted > 0

    def computing(self, sequence: EngineSequence, now: float) -> None:
        """Record that a step begins to compute tokens of the request."""
        self.by_id[sequence.request_id].account.times.setdefault("compute_started", now)

    def computed(self, sequence: EngineSequence, sampled: SampleResult, samples: bool) -> None:
        """Process the result of a sequence's chunk.

        `samples`: the result has the sequence's next token.
        """
        if sampled.prompt:
            sequence.num_scored += len(sampled.prompt)
            self._emit(PromptScored(sequence.request_id, sampled.prompt))
        if sampled.num_pooled:
            self._pool(sequence, sampled)
        if samples:
            self._append(sequence, sampled)

    def _pool(self, sequence: EngineSequence, sampled: SampleResult) -> None:
        """Add hidden states to the request's embedding, and end the request with the last of them."""
        request, part = self.by_id[sequence.request_id], np.frombuffer(sampled.pooled, np.float32)
        request.pooled = part if request.pooled is None else request.pooled + part
        sequence.num_scored += sampled.num_pooled
        if sequence.num_scored < sequence.num_to_score:
            return
        request.count_preemptions()
        request.account.times["first_token"] = self._cached.clock()
        num_pooled = 1 if sequence.sampling is not None and sequence.sampling.pooling == "last" else sequence.num_prompt
        self._emit(Embedded(sequence.request_id, (request.pooled / num_pooled).tobytes(), request.account))
        self._finish(sequence.request_id)

    def _append(self, sequence: EngineSequence, sampled: SampleResult) -> None:
        """Add the sequence's next token, or end the request with the failure."""
        if sampled.failure is not None:
            self._fail(sequence, sampled.failure)
            return
        request = self.by_id[sequence.request_id]
        account = request.account
        first = len(sequence.token_ids) == sequence.num_prompt
        sequence.turn = self._next_arrival()
        if first:
            account.times.setdefault("first_token", self._cached.clock())
            if request.retention is not None:
                self._pin(request, sequence, request.retention)
        news = (sequence.num_preemptions > 0 and request.count_preemptions()) or first
        sequence.token_ids.append(sampled.token_id)
        finish = self._finish_reason(sequence, sampled.token_id)
        request_id, token_id, choice = sequence.request_id, sampled.token_id, sequence.choice
        if news or finish is not None or sampled.logprobs is not None:
            new_account = account if news else None
            self._tokens.add(Token(request_id, token_id, sampled.logprobs, new_account, finish, choice))
        else:
            self._tokens.add_plain(request_id, token_id, choice)
        if finish is not None:
            self._end(request, sequence)

    def finish_filled(self) -> None:
        """End requests without output whose blocks are all there."""
        for sequence in [*self._filling]:
            self._finish_if_filled(sequence)

    def _finish_if_filled(self, sequence: EngineSequence) -> None:
        if not sequence.only_fills or sequence.num_remaining or sequence.hedged or sequence not in self.running_set:
            return
        self.by_id[sequence.request_id].count_preemptions()
        self._fill(sequence)

    def part(self) -> None:
        """Fork sequences that have computed all shared tokens.

        No step may run.
        """
        if not self._num_parted:
            return
        for lead in self.running_set.forkable:
            siblings, lead.siblings = lead.siblings, []
            lead.turn = self._next_arrival()
            self.running_set.fork(lead, siblings, lead.fork_at)

    def _finish_reason(self, sequence: EngineSequence, token_id: int) -> FinishReason | None:
        sampling = sequence.sampling
        assert sampling is not None
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        # With a grammar and ignore_eos the end token is sampled only where no other token may follow (see the sampler).
        if token_id in self._eos_token_ids and (not sampling.ignore_eos or sampling.structured is not None):
            return FinishReason.STOP
        if sequence.num_sampled >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def loan_bound(self, sequence: EngineSequence, first: int) -> None:
        """Correct the account of a hedged request; that of another is made when its loan is over."""
        if sequence.hedged:
            account, count = self.by_id[sequence.request_id].account, len(sequence.keys) - first
            account.computed_blocks -= count
            account.computed_tokens -= count * self._kv_cache.layout.block_tokens

    def loan_hedged(self, sequence: EngineSequence) -> bool:
        """Compute the request, as far as its loan has not brought its blocks."""
        sequence.hedged = True
        self._run(sequence)
        return True

    def loan_over(self, sequence: EngineSequence, lost_blocks: bool) -> None:
        """Compute the blocks that the loan did not bring."""
        was_hedged, sequence.hedged, sequence.held_at = sequence.hedged, False, None
        if lost_blocks:
            self._lost(sequence)
        elif not was_hedged:
            self._run(sequence)
        else:
            self._finish_if_filled(sequence)

    def _run(self, sequence: EngineSequence) -> None:
        """Compute the sequence from now on, and count what is left to compute."""
        self.running_set.run(sequence)
        self._count_left(sequence)
        self._finish_if_filled(sequence)

    def _over(self, request: _Request) -> None:
        self._num_parted -= request.is_parted

    def _leaves(self, request: _Request, chain: EngineSequence) -> None:
        self._filling.pop(chain, None)
        request.num_preemptions_over += chain.num_preemptions
        request.num_recomputed_over += chain.num_recomputed
        self.running_set.drop(chain)
