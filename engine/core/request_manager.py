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
`engine/core/preemption.py` has the policy.

This describes one sequence. A request of several choices is admitted and borrows as one, its lead; then each choice
runs and finishes by itself (`engine/sampling/parallel_sampling.py`), and the request is over with the last one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.block_keys import root_key
from engine.core.running_set import RunningSet
from engine.core_types import Chunk, FinishReason, SampleResult, Sequence
from engine.kv.kv_cache_manager import KVCacheManager
from engine.kv.kv_stats import POOL
from engine.kv.pins import Retention
from engine.lending.borrower_manager import BorrowerManager
from engine.lending.loan import BorrowRequest
from engine.messages.from_engine import Embedded, Failed, Filled, FromEngine, KvAccount, PromptScored, Rejected, Token
from engine.messages.to_engine import Generate
from engine.sampling.beam_search import BeamSearch
from engine.sampling.parallel_sampling import chains_of, is_complete, num_blocks_at_most, search_of, without_tail


@dataclass(slots=True)
class _Request:
    chains: dict[int, Sequence]
    """Sequences that are not over, by choice."""
    account: KvAccount
    num_choices: int
    """Number of choices wanted; of a beam search, the number of beams returned."""
    search: BeamSearch | None = None
    retention: Retention | None = None
    """Time for which the prompt's blocks are pinned."""
    num_preemptions_over: int = 0
    """Preemptions of sequences that are over."""
    num_recomputed_over: int = 0
    to_store: bool = False
    """Whether its blocks are written to the shared store, where it has no output."""
    pooled: NDArray[np.float32] | None = None
    """Sum of the hidden states pooled so far."""

    @property
    def is_parted(self) -> bool:
        """Whether its sequences are forked from each other, now or later."""
        return self.num_choices > 1 or self.search is not None

    def count_preemptions(self) -> bool:
        """Update the account's preemptions; return False when nothing changed."""
        before = self.account.preemptions
        chains = self.chains.values()
        self.account.preemptions = self.num_preemptions_over + sum(s.num_preemptions for s in chains)
        self.account.recomputed_tokens = self.num_recomputed_over + sum(s.num_recomputed for s in chains)
        return self.account.preemptions > before


class RequestManager:
    """Requests by id, and the loans taken for them."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        borrower_manager: BorrowerManager,
        model_fingerprint: bytes,
        eos_token_ids: frozenset[int],
        emit: Callable[[FromEngine], None],
        next_arrival: Callable[[], int],
        reserve_output_tokens: int,
        copy_block: Callable[[int, int], None],
        adapters: frozenset[bytes] = frozenset(),
    ) -> None:
        """Create the manager.

        `next_arrival` numbers arrivals and turns. `adapters`: fingerprints of the loaded LoRA adapters.

        `copy_block(source, target)` is called between steps.
        """
        self.running_set = RunningSet(kv_cache, reserve_output_tokens, next_arrival, copy_block)
        self._kv_cache = kv_cache
        self._borrower_manager = borrower_manager
        self._model_fingerprint = model_fingerprint
        self._eos_token_ids = eos_token_ids
        self._emit = emit
        self._next_arrival = next_arrival
        self._adapters = adapters
        self._requests: dict[str, _Request] = {}
        self._num_parted = 0
        """Number of requests with forked sequences."""
        self._filling: dict[Sequence, None] = {}
        """Sequences of requests without output."""

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        return sum(len(request.chains) for request in self._requests.values())

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences of all requests, which hold blocks."""
        return [chain for request in self._requests.values() for chain in request.chains.values()]

    def admit(self, message: Generate) -> None:
        """Start a request with blocks reserved for its prompt and some output, or send Rejected."""
        layout, pool = self._kv_cache.layout, self._kv_cache.pool
        message = without_tail(message, layout)
        root = root_key(self._model_fingerprint, message.cache_salt, message.adapter)
        search = search_of(message, self._eos_token_ids)
        chains = chains_of(message, root, search, self._next_arrival)
        if message.request_id in self._requests:
            self._reject(message.request_id, "a request of this id is running here", permanent=True)
            return
        if message.adapter and message.adapter not in self._adapters:
            self._reject(message.request_id, f"no adapter {message.adapter.hex()} is loaded here", permanent=True)
            return
        if not message.prompt or not chains or any(is_complete(chain) for chain in chains):
            reason = f"nothing to compute: {len(message.prompt)} prompt tokens, {len(message.emitted)} emitted"
            self._reject(message.request_id, reason, permanent=True)
            return
        if (total := num_blocks_at_most(chains, layout)) > pool.num_blocks:
            tokens = "max_tokens" if len(chains) == 1 else f"{len(chains)} x max_tokens"
            reason = f"prompt + {tokens} need {total} KV blocks, the pool has {pool.num_blocks}"
            self._reject(message.request_id, reason, permanent=True)
            return
        sequence = chains[0]
        keys = self._kv_cache.usable_keys(sequence)
        if not self.running_set.admit(sequence, keys):
            needed = self.running_set.num_promised_blocks(sequence)
            reason = f"{needed} KV blocks needed, {pool.num_available} available now"
            if waiting := len(self.running_set.preempted):
                reason += f", {waiting} preempted requests wait for some"
            self._reject(message.request_id, reason, permanent=False)
            return
        self._kv_cache.counts.looked(POOL, len(keys), len(sequence.blocks))
        account = KvAccount(reused_blocks=len(sequence.blocks), times={"admitted": self._kv_cache.clock()})
        by_choice = {chain.choice: chain for chain in chains}
        request = _Request(by_choice, account, message.sampling.n, search, message.retention, to_store=message.to_store)
        self._requests[message.request_id] = request
        self._num_parted += request.is_parted
        if sequence.only_fills:
            self._filling[sequence] = None
        lender = message.lender_computes if message.borrow else None
        if not self._borrower_manager.take(BorrowRequest(sequence, keys, lender, account, self, message.reads_store)):
            self.loan_over(sequence, lost_blocks=False)

    def adopt(self, batch: list[Chunk]) -> bool:
        """Give starting sequences the blocks cached by now, so siblings that arrived together compute once.

        Returns True when the batch has to be made again.
        """
        adopted = 0
        for chunk in batch:
            sequence = chunk.sequence
            if sequence.sampling is None or sequence.decoding or sequence.num_preemptions or sequence.hedged:
                continue
            account = self._requests[sequence.request_id].account
            if "compute_started" not in account.times:
                found = self._kv_cache.adopt(sequence)
                self._kv_cache.counts.found(POOL, found)
                account.reused_blocks += found
                account.computed_blocks -= found
                account.computed_tokens -= found * self._kv_cache.layout.block_tokens
                adopted += found
        return adopted > 0

    def computing(self, sequence: Sequence, now: float) -> None:
        """Record that a step begins to compute tokens of the request."""
        self._requests[sequence.request_id].account.times.setdefault("compute_started", now)

    def has(self, sequence: Sequence) -> bool:
        """Return whether the sequence is not over."""
        request = self._requests.get(sequence.request_id)
        return request is not None and request.chains.get(sequence.choice) is sequence

    def computed(self, sequence: Sequence, sampled: SampleResult, samples: bool) -> None:
        """Process the result of a sequence's chunk.

        `samples`: the result has the sequence's next token, and those after it as far as draft tokens were accepted.
        The KV cache manager has already counted the chunk's own tokens; accepted draft tokens are counted here.
        """
        if sampled.prompt:
            sequence.num_scored += len(sampled.prompt)
            self._emit(PromptScored(sequence.request_id, sampled.prompt))
        if sampled.num_pooled:
            self._pool(sequence, sampled)
        if samples:
            self._append(sequence, sampled)
            for following in sampled.following:
                if not self.has(sequence):
                    return  # the token before it was the last
                self._kv_cache.advance(sequence, 1)  # the draft token, which is the sequence's last token by now
                self._append(sequence, following, followed_draft=True)

    def _pool(self, sequence: Sequence, sampled: SampleResult) -> None:
        """Add hidden states to the request's embedding, and end the request with the last of them."""
        request, part = self._requests[sequence.request_id], np.frombuffer(sampled.pooled, np.float32)
        request.pooled = part if request.pooled is None else request.pooled + part
        sequence.num_scored += sampled.num_pooled
        if sequence.num_scored < sequence.num_to_score:
            return
        request.count_preemptions()
        request.account.times["first_token"] = self._kv_cache.clock()
        num_pooled = 1 if sequence.sampling is not None and sequence.sampling.pooling == "last" else sequence.num_prompt
        self._emit(Embedded(sequence.request_id, (request.pooled / num_pooled).tobytes(), request.account))
        self._finish(sequence.request_id)

    def _append(self, sequence: Sequence, sampled: SampleResult, followed_draft: bool = False) -> None:
        """Add the sequence's next token, or a beam's candidates, or end the request with the failure."""
        if sampled.failure is not None:
            self._emit(Failed(sequence.request_id, sampled.failure))
            self._finish(sequence.request_id)
            return
        request = self._requests[sequence.request_id]
        account = request.account
        first = len(sequence.token_ids) == sequence.num_prompt
        sequence.turn = self._next_arrival()
        if first:
            account.times.setdefault("first_token", self._kv_cache.clock())
            if request.retention is not None:
                account.pinned_blocks = self._kv_cache.pin_prompt(sequence, request.retention)
        news = (sequence.num_preemptions > 0 and request.count_preemptions()) or first
        if request.search is not None:
            assert sampled.logprobs is not None
            request.search.add_logprobs(sequence.choice, sampled.logprobs)
            sequence.heard = True
            return
        sequence.token_ids.append(sampled.token_id)
        finish = self._finish_reason(sequence, sampled.token_id)
        said = account if news else None
        token = Token(
            sequence.request_id,
            sampled.token_id,
            sampled.logprobs,
            said,
            finish,
            choice=sequence.choice,
            drafted=sampled.num_draft_tokens,
            followed_draft=followed_draft,
        )
        self._emit(token)
        if finish is not None:
            self._end(request, sequence)

    def finish_filled(self) -> None:
        """End requests without output whose blocks are all there."""
        for sequence in [*self._filling]:
            self._finish_if_filled(sequence)

    def _finish_if_filled(self, sequence: Sequence) -> None:
        if not sequence.only_fills or sequence.num_remaining or sequence.hedged or sequence not in self.running_set:
            return
        request = self._requests[sequence.request_id]
        account = request.account
        account.times.setdefault("first_token", self._kv_cache.clock())
        request.count_preemptions()
        if request.retention is not None:
            account.pinned_blocks = self._kv_cache.pin_prompt(sequence, request.retention)
        if request.to_store:
            account.stored_blocks = self._kv_cache.store_keys(sequence.keys)
        self._emit(Filled(sequence.request_id, account))
        self._finish(sequence.request_id)

    def part(self) -> None:
        """Fork sequences that have computed all shared tokens, and advance beam searches whose candidates are known.

        No step may run.
        """
        if not self._num_parted:
            return
        for lead in self.running_set.forkable:
            siblings, lead.siblings = lead.siblings, []
            lead.turn = self._next_arrival()
            self.running_set.fork(lead, siblings, lead.fork_at)
        searches = [r for r in self._requests.values() if r.search is not None and r.search.ready]
        for request in searches:
            self._advance(request)

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Cancel a request, or one choice that has a token already."""
        if (request := self._requests.get(request_id)) is None:
            return
        if choice is None:
            self._borrower_manager.cancel(request_id)
            self._finish(request_id)
        elif (chain := request.chains.get(choice)) is not None:
            self._end(request, chain)

    def _advance(self, request: _Request) -> None:
        """Advance a search whose candidates are all known: decide which beams continue."""
        search, chains = request.search, request.chains
        assert search is not None
        moves = search.advance()
        if search.over:
            self._deliver(request, search)
            return
        for slot in chains.keys() - {move.parent for move in moves}:
            self.running_set.drop(chains[slot])
            self._kv_cache.preempt(chains[slot])
        for move in moves:  # all forks before any sequence grows: one that continues twice does so from its present end
            if move.slot != move.parent:
                parent, child = chains[move.parent], chains[move.slot]
                child.token_ids = [*parent.token_ids, move.token_id]
                self.running_set.fork(parent, [child], parent.num_tokens)
        for move in moves:
            chains[move.slot].heard = False
            if move.slot == move.parent:
                chains[move.slot].token_ids.append(move.token_id)

    def _deliver(self, request: _Request, search: BeamSearch) -> None:
        """Send the best beams and end the request."""
        request_id = next(iter(request.chains.values())).request_id
        account: KvAccount | None = request.account
        for rank, found in enumerate(search.found()[: request.num_choices]):
            *others, last = found.beam.token_ids
            for token_id in others:
                self._emit(Token(request_id, token_id, account=account, choice=rank))
                account = None
            finish = FinishReason.STOP if found.stopped else FinishReason.LENGTH
            self._emit(Token(request_id, last, None, account, finish, rank, found.beam.logprob))
            account = None
        self._finish(request_id)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
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

    def loan_bound(self, sequence: Sequence, first: int) -> None:
        """Correct the account of a hedged request; that of another is made when its loan is over."""
        if sequence.hedged:
            account, count = self._requests[sequence.request_id].account, len(sequence.keys) - first
            account.computed_blocks -= count
            account.computed_tokens -= count * self._kv_cache.layout.block_tokens

    def loan_hedged(self, sequence: Sequence) -> bool:
        """Compute the request, as far as its loan has not brought its blocks."""
        sequence.hedged = True
        self._run(sequence)
        return True

    def loan_over(self, sequence: Sequence, lost_blocks: bool) -> None:
        """Compute the blocks that the loan did not bring."""
        was_hedged, sequence.hedged, sequence.held_at = sequence.hedged, False, None
        if lost_blocks:
            self._finish(sequence.request_id)
            reason = "blocks are quarantined for a silent lender and no others are available"
            self._reject(sequence.request_id, reason, permanent=False)
        elif not was_hedged:
            self._run(sequence)
        else:
            self._finish_if_filled(sequence)

    def _run(self, sequence: Sequence) -> None:
        """Compute the sequence from now on, and count what is left to compute."""
        self.running_set.run(sequence)
        account = self._requests[sequence.request_id].account
        total = self._kv_cache.layout.blocks_for(sequence.num_prompt)
        brought = account.restored_blocks + account.store_blocks + account.moved_blocks
        account.computed_blocks = total - account.reused_blocks - brought
        account.computed_tokens = sequence.num_prompt - sequence.num_computed
        self._finish_if_filled(sequence)

    def _finish(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        self._num_parted -= request.is_parted
        for chain in request.chains.values():
            self._filling.pop(chain, None)
            self.running_set.drop(chain)
            self._kv_cache.finish(chain)

    def _end(self, request: _Request, chain: Sequence) -> None:
        """End this choice, and the request with its last choice."""
        assert not chain.siblings
        if len(request.chains) == 1:
            self._finish(chain.request_id)
            return
        del request.chains[chain.choice]
        request.num_preemptions_over += chain.num_preemptions
        request.num_recomputed_over += chain.num_recomputed
        self.running_set.drop(chain)
        self._kv_cache.finish(chain)

    def _reject(self, request_id: str, reason: str, permanent: bool) -> None:
        self._emit(Rejected(request_id, reason, permanent))
