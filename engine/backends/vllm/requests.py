"""Requests of a vLLM engine: admitted or rejected at once, borrowing or submitted to vLLM, until they finish.

    admitted ──no loan──────────────▶ submitted ──▶ finished
        └──borrowing──loan is over──────┘  (vLLM schedules, preempts and resumes it; nothing of it is lost)

Each choice of a request is a sequence and a vLLM request of its own. The first one borrows and computes the prompt; the
others are submitted with its first token and find the prompt cached.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.backends.vllm.kv_cache import VllmKVCache
from engine.backends.vllm.sampling import sampling
from engine.backends.vllm.submitted import Submissions, Submitted
from engine.block_keys import root_key
from engine.core_types import FinishReason, RequestFailure, SampleResult, Sequence, TokenLogprobs
from engine.kv.kv_stats import POOL
from engine.lending.borrower_manager import BorrowerManager
from engine.lending.loan import BorrowRequest
from engine.messages.from_engine import Failed, Filled, FromEngine, KvAccount, PromptScored, Rejected, Token
from engine.messages.to_engine import Generate
from engine.sampling.parallel_sampling import chains_of, is_complete, num_blocks_at_most, without_tail


@dataclass(slots=True)
class _Request:
    chains: dict[int, Sequence]
    """Sequences that are not over, by choice."""
    account: KvAccount
    waiting: list[Sequence] = field(default_factory=list)
    """Choices to submit with the first choice's first token."""
    reserved: int = 0
    """Blocks reserved for `waiting`."""
    num_preemptions: int = 0
    """Preemptions that the account knows."""
    to_store: bool = False
    """Whether its blocks are written to the shared store, where it has no output."""


class VllmRequests:
    """Requests by id; the running set of load reports."""

    def __init__(
        self,
        kv_cache: VllmKVCache,
        borrower_manager: BorrowerManager,
        submissions: Submissions,
        model_fingerprint: bytes,
        eos_token_ids: frozenset[int],
        emit: Callable[[FromEngine], None],
        next_arrival: Callable[[], int],
        reserve_output_tokens: int,
        adapters: frozenset[bytes],
    ) -> None:
        self._kv_cache = kv_cache
        self._borrower_manager = borrower_manager
        self._submissions = submissions
        self._model_fingerprint = model_fingerprint
        self._eos_token_ids = eos_token_ids
        self._emit = emit
        self._next_arrival = next_arrival
        self._reserve_output_tokens = reserve_output_tokens
        self._adapters = adapters
        self._requests: dict[str, _Request] = {}
        self.num_preemptions = 0

    # ------------------------------------------------------------------ for load reports

    @property
    def running_set(self) -> "VllmRequests":
        return self

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        return sum(len(request.chains) for request in self._requests.values())

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences of all requests."""
        return [chain for request in self._requests.values() for chain in request.chains.values()]

    @property
    def num_reserved(self) -> int:
        """Blocks reserved for choices that wait for the first one."""
        return sum(request.reserved for request in self._requests.values())

    @property
    def running(self) -> list[Sequence]:
        return [each.sequence for each in self._submissions.of_requests if not each.is_preempted]

    @property
    def preempted(self) -> list[Sequence]:
        return [each.sequence for each in self._submissions.of_requests if each.is_preempted]

    @property
    def short(self) -> bool:
        return any(each.is_preempted for each in self._submissions.of_requests)

    # ------------------------------------------------------------------ from the front

    def admit(self, message: Generate) -> None:
        """Start a request with blocks reserved for its prompt and some output, or send Rejected."""
        layout, pool = self._kv_cache.layout, self._kv_cache.pool
        message = without_tail(message, layout)
        root = root_key(self._model_fingerprint, message.cache_salt, message.adapter)
        if message.sampling.beam is not None:
            self._reject(message.request_id, "sampling.beam_width: the vllm engine has no beam search", permanent=True)
            return
        chains = chains_of(message, root, None, self._next_arrival)
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
        lead, *others = chains
        lead.siblings = []
        keys = self._kv_cache.usable_keys(lead)
        shared = lead.fork_at // layout.block_tokens
        for_others = sum(self._promised_blocks(other) - shared for other in others)
        own = self._promised_blocks(lead)
        if self.short or not self._kv_cache.start(lead, keys, own + for_others):
            reason = f"{own + for_others} KV blocks needed, {0 if self.short else pool.num_available} available now"
            self._reject(message.request_id, reason, permanent=False)
            return
        lead.num_reserved -= for_others
        self._kv_cache.counts.looked(POOL, len(keys), len(lead.blocks))
        account = KvAccount(reused_blocks=len(lead.blocks), times={"admitted": self._kv_cache.clock()})
        by_choice = {chain.choice: chain for chain in chains}
        request = _Request(by_choice, account, others, for_others, to_store=message.to_store)
        self._requests[message.request_id] = request
        lender = message.lender_computes if message.borrow else None
        if not self._borrower_manager.take(BorrowRequest(lead, keys, lender, account, self, message.reads_store)):
            self.loan_over(lead, lost_blocks=False)

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Cancel a request, or one choice that has a token already."""
        if (request := self._requests.get(request_id)) is None:
            return
        if choice is None:
            self._borrower_manager.cancel(request_id)
            self._finish(request_id)
        elif (chain := request.chains.get(choice)) is not None and chain not in request.waiting:
            self._end(request, chain)

    # ------------------------------------------------------------------ the loan's owner

    def loan_bound(self, sequence: Sequence, first: int) -> None:
        """Do nothing: the prefix is counted when the loan is over."""

    def loan_hedged(self, sequence: Sequence) -> bool:
        """Return False: vLLM computes nothing of a request whose blocks it still waits for."""
        return False

    def loan_over(self, sequence: Sequence, lost_blocks: bool) -> None:
        """Submit the request; vLLM computes the blocks that the loan did not bring."""
        request = self._requests[sequence.request_id]
        if lost_blocks:
            self._finish(sequence.request_id)
            reason = "blocks are quarantined for a silent lender and no others are available"
            self._reject(sequence.request_id, reason, permanent=False)
            return
        account = request.account
        total = self._kv_cache.layout.blocks_for(sequence.num_prompt)
        brought = account.store_blocks + account.moved_blocks
        account.computed_blocks = total - account.reused_blocks - brought
        account.computed_tokens = sequence.num_prompt - sequence.num_computed
        if sequence.only_fills and not account.computed_blocks:
            self._filled(sequence)
            return
        self._submissions.add(sequence, self._promised_blocks(sequence))

    # ------------------------------------------------------------------ from vLLM

    def scheduled(self, submitted: Submitted, num_hits: int) -> None:
        """Record that vLLM starts to compute a request, of whose tokens `num_hits` full blocks were cached."""
        request = self._requests[submitted.sequence.request_id]
        account = request.account
        if "compute_started" in account.times:
            return
        account.times["compute_started"] = self._kv_cache.clock()
        found = num_hits - account.reused_blocks - account.store_blocks - account.moved_blocks
        if found > 0:  # blocks that other requests computed meanwhile
            self._kv_cache.counts.found(POOL, found)
            account.reused_blocks += found
            account.computed_blocks -= found
            account.computed_tokens -= found * self._kv_cache.layout.block_tokens

    def produced(self, submitted: Submitted, output: Any) -> None:
        """Process vLLM's output of a step for one sequence: tokens, scores of the prompt, and the end."""
        sequence = submitted.sequence
        if (scores := output.new_prompt_logprobs_tensors) is not None:
            self._score(sequence, scores)
        result = sampling.results.pop(submitted.request_id, None)
        if result is not None and result.failure is not None:
            self._fail(sequence, result.failure)
            return
        finish = _finish_reason(str(output.finish_reason)) if output.finish_reason is not None else None
        if output.finish_reason is not None and finish is None:
            self._finish(sequence.request_id)
            self._reject(sequence.request_id, f"vLLM ended the request: {output.finish_reason}", permanent=False)
            return
        if sequence.only_fills and output.new_token_ids:
            self._filled(sequence)  # vLLM samples a token after every prompt; nobody gets this one
            return
        for token_id in output.new_token_ids:
            last = token_id is output.new_token_ids[-1]
            self._append(submitted, token_id, result, finish if last else None)

    def _append(
        self, submitted: Submitted, token_id: int, result: SampleResult | None, finish: FinishReason | None
    ) -> None:
        sequence = submitted.sequence
        request = self._requests[sequence.request_id]
        account = request.account
        first = len(sequence.token_ids) == sequence.num_prompt
        if first:
            account.times.setdefault("first_token", self._kv_cache.clock())
        sequence.num_preemptions = submitted.request.num_preemptions
        preempted = sum(chain.num_preemptions for chain in request.chains.values())
        told = account if first or preempted > request.num_preemptions else None
        if preempted > request.num_preemptions:
            self.num_preemptions += preempted - request.num_preemptions
            request.num_preemptions = account.preemptions = preempted
        sequence.token_ids.append(token_id)
        logprobs = result.logprobs if result is not None else None
        self._emit(
            Token(sequence.request_id, token_id, logprobs, told, finish, choice=sequence.choice),
        )
        if request.waiting:
            self._submit_waiting(request)
        if finish is not None:
            self._end(request, sequence)

    def _filled(self, sequence: Sequence) -> None:
        """End a request without output, whose blocks are all there."""
        request = self._requests[sequence.request_id]
        request.account.times.setdefault("first_token", self._kv_cache.clock())
        if request.to_store:
            request.account.stored_blocks = self._kv_cache.store_keys(sequence.keys)
        self._emit(Filled(sequence.request_id, request.account))
        self._finish(sequence.request_id)

    def _submit_waiting(self, request: _Request) -> None:
        """Submit the other choices, whose prompt is cached by now."""
        waiting, request.waiting = request.waiting, []
        self._kv_cache.pool.unreserve(request.reserved)
        request.reserved = 0
        for sequence in waiting:
            keys, promised = self._kv_cache.usable_keys(sequence), self._promised_blocks(sequence)
            if not self._kv_cache.start(sequence, keys, promised):  # its prompt was evicted: vLLM waits for blocks
                promised = 0
            self._submissions.add(sequence, promised)

    def _score(self, sequence: Sequence, scores: Any) -> None:
        """Send the log probabilities of prompt tokens that no earlier attempt sent."""
        token_ids, logprobs = scores.logprob_token_ids.tolist(), scores.logprobs.tolist()
        wanted = sequence.sampling.prompt_logprobs if sequence.sampling is not None else None
        rows = range(sequence.num_scored, sequence.num_to_score)
        told = tuple(
            TokenLogprobs(logprobs[row][0], tuple(token_ids[row][1:][:wanted]), tuple(logprobs[row][1:][:wanted]))
            for row in rows
        )
        sequence.num_scored += len(told)
        self._emit(PromptScored(sequence.request_id, told))

    def _fail(self, sequence: Sequence, failure: RequestFailure) -> None:
        self._finish(sequence.request_id)
        self._emit(Failed(sequence.request_id, failure))

    # ------------------------------------------------------------------ ends

    def _finish(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        self._kv_cache.pool.unreserve(request.reserved)
        for chain in request.chains.values():
            self._kv_cache.finish(chain)

    def _end(self, request: _Request, chain: Sequence) -> None:
        """End this choice, and the request with its last choice."""
        if len(request.chains) == 1:
            self._finish(chain.request_id)
            return
        del request.chains[chain.choice]
        self._kv_cache.finish(chain)

    def _promised_blocks(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence is admitted with: its prompt, and some output."""
        return self._kv_cache.layout.blocks_for(sequence.num_tokens_reserved(self._reserve_output_tokens))

    def _reject(self, request_id: str, reason: str, permanent: bool) -> None:
        self._emit(Rejected(request_id, reason, permanent))


def _finish_reason(reason: str) -> FinishReason | None:
    """Return Tandem's name of vLLM's reason; None for an end that is no answer."""
    return {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}.get(reason)
