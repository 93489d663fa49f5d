"""Requests of a vLLM engine: admitted or rejected at once, borrowing or submitted to vLLM, until they finish.

    admitted ──no loan──────────────▶ submitted ──▶ finished
        └──borrowing──loan is over──────┘  (vLLM schedules, preempts and resumes it; nothing of it is lost)

Each choice of a request is a sequence and a vLLM request of its own. The first one borrows and computes the prompt; the
others are submitted with its first token and find the prompt cached.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.backends.vllm.kv.cache import VllmKVCache
from engine.backends.vllm.media.features import Media
from engine.backends.vllm.sampling.native_sampling import Sampling
from engine.backends.vllm.submitted import Submissions, Submitted
from engine.core.request_table import Request, RequestTable, TableParts
from engine.core_types import EngineSequence, FinishReason, RequestFailure, SampleResult, TokenLogprobs
from engine.messages.from_engine import Embedded, Failed, PromptScored, Token
from engine.messages.to_engine import Generate
from kvcache.block_keys import BlockKey
from loans.account import KvAccount


@dataclass(slots=True)
class _Request(Request):
    waiting: list[EngineSequence] = field(default_factory=list)
    """Choices to submit with the first choice's first token."""
    reserved: int = 0
    """Blocks reserved for `waiting`."""
    tells_pins: bool = False
    """Whether its account is still to say how much of its prompt was pinned."""
    held_back: Token | None = None
    """Last token of a request whose prompt is still to be pinned: its account says how much was."""


FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
"""Tandem's names of vLLM's reasons; another reason is no answer."""


class VllmRequests(RequestTable[_Request]):
    """Requests by id; the running set of load reports."""

    _kv_cache: VllmKVCache

    def __init__(
        self,
        parts: TableParts,
        submissions: Submissions,
        sampling: Sampling,
        media: Media,
        is_naming: Callable[[], bool],
    ) -> None:
        """Create the table; `is_naming` returns whether blocks that a step filled wait for their names."""
        super().__init__(parts)
        self._is_naming = is_naming
        self._held_back: list[EngineSequence] = []
        """Sequences whose last token waits for the names of their prompts' blocks."""
        self._max_context_tokens = parts.info.max_context_tokens
        self._media = media
        self._submissions = submissions
        self._sampling = sampling
        self.num_preemptions = 0
        self.num_draft_tokens = 0
        """Draft tokens verified since the engine started."""
        self.num_right = 0

    # ------------------------------------------------------------------ for load reports

    @property
    def running_set(self) -> "VllmRequests":  # type: ignore[override]
        return self

    @property
    def num_reserved(self) -> int:
        """Blocks reserved for choices that wait for the first one."""
        return sum(request.reserved for request in self.by_id.values())

    @property
    def running(self) -> list[EngineSequence]:
        self._submissions.count_computed()
        preempted = set(self._submissions.preempted)
        return [each.sequence for each in self._submissions.of_requests if each not in preempted]

    @property
    def preempted(self) -> list[EngineSequence]:
        return [each.sequence for each in self._submissions.preempted]

    @property
    def short(self) -> bool:
        return bool(self._submissions.preempted)

    # ------------------------------------------------------------------ of each request

    def admit(self, message: Generate) -> None:
        if (failure := self._sampling.mismatch(message) or self._too_long(message)) is None:
            super().admit(message)
        else:
            self._emit(Failed(message.request_id, failure))

    def _too_long(self, message: Generate) -> RequestFailure | None:
        """Return why a prompt does not fit into vLLM's longest context, which may be shorter than the model's."""
        most, count = self._max_context_tokens, len(message.prompt) + len(message.emitted)
        if message.sampling.pooling is None:
            most -= 1 + (self._sampling.num_beyond if message.sampling.max_tokens == 0 else 0)
        if count <= most:
            return None
        return RequestFailure("token_ids", f"the prompt has {count} tokens, vLLM reads at most {most}")

    def _unsupported(self, message: Generate) -> str:
        return self._media.refusal(message.items) or self._sampling.refusal(message)

    def _request(self, message: Generate, chains: list[EngineSequence]) -> _Request:
        by_choice = {chain.choice: chain for chain in chains}
        chains[0].siblings = []
        return _Request(
            by_choice,
            KvAccount(),
            message.to_store,
            message.retention,
            waiting=chains[1:],
            tells_pins=message.retention is not None,
        )

    def _start(self, request: _Request, chains: list[EngineSequence], keys: list[BlockKey]) -> str:
        lead = chains[0]
        shared = lead.fork_at // self._kv_cache.layout.block_tokens
        # a model of windows or states may reserve fewer blocks than its chain has
        for_others = sum(max(0, self._num_blocks_to_reserve(other) - shared) for other in request.waiting)
        needed = self._num_blocks_to_reserve(lead) + for_others
        if self.short or not self._kv_cache.start(lead, keys, needed):
            return f"{needed} KV blocks needed, {0 if self.short else self._kv_cache.pool.num_available} available now"
        lead.num_reserved -= for_others
        request.reserved = for_others
        return ""

    def _has_begun(self, request: _Request, chain: EngineSequence) -> bool:
        return chain not in request.waiting

    def _over(self, request: _Request) -> None:
        self._kv_cache.pool.unreserve(request.reserved)

    def loan_over(self, sequence: EngineSequence, lost_blocks: bool) -> None:
        """Submit the request; vLLM computes the blocks that the loan did not bring."""
        if lost_blocks:
            self._lost(sequence)
            return
        self._count_left(sequence)
        if not self.fill_if_complete(sequence, sequence.num_computed):
            self._submissions.add(sequence, self._num_blocks_to_reserve(sequence))

    def give_up(self, sequence: EngineSequence, reason: str) -> None:
        """End a request that this worker cannot compute now; the router places it again."""
        if self.has(sequence):
            self._finish(sequence.request_id)
            self._reject(sequence.request_id, reason, permanent=False)

    def fill_if_complete(self, sequence: EngineSequence, num_tokens: int) -> bool:
        """End a request without output when `num_tokens`, whose blocks are named, are all; return whether it ended."""
        if not sequence.only_fills or num_tokens < sequence.num_prompt or not self.has(sequence):
            return False
        self._fill(sequence)
        return True

    def named(self, sequence: EngineSequence, num_tokens: int) -> None:
        """Process that the blocks of a sequence's first `num_tokens` have their names."""
        if self.fill_if_complete(sequence, num_tokens) or not self.has(sequence):
            return
        request = self.by_id[sequence.request_id]
        if request.retention is not None and len(sequence.token_ids) > sequence.num_prompt:
            self._pin_prompt(request, sequence, is_last_chance=False)
            self._end_held_back(request, sequence)

    def all_named(self) -> None:
        """Process that no block waits for its name: of prompts that are not named whole, a part is pinned."""
        held_back, self._held_back = self._held_back, []
        for sequence in held_back:
            if self.has(sequence):
                request = self.by_id[sequence.request_id]
                self._pin_prompt(request, sequence, is_last_chance=True)
                self._end_held_back(request, sequence)

    def _end_held_back(self, request: _Request, sequence: EngineSequence) -> None:
        if request.held_back is not None and request.retention is None:
            self._tokens.add(request.held_back)
            self.send_tokens()
            self._end(request, sequence)

    def _pin_prompt(self, request: _Request, sequence: EngineSequence, is_last_chance: bool) -> None:
        """Pin the blocks of a prompt that is computed, once they all have names."""
        retention = request.retention
        if retention is None or sequence is not next(iter(request.chains.values())):
            return
        if is_last_chance or all(name in self._cached.pool for name in self._kv_cache.prompt_names(sequence)):
            self._pin(request, sequence, retention)
            request.retention = None

    # ------------------------------------------------------------------ from vLLM

    def scheduled(self, submitted: Submitted, num_hits: int) -> None:
        """Record that vLLM starts to compute a request, of whose tokens `num_hits` full blocks were cached."""
        request = self.by_id[submitted.sequence.request_id]
        account = request.account
        if "compute_started" in account.times:
            return
        account.times["compute_started"] = self._cached.clock()
        # one state stands for all blocks before it, so what was brought does not say how far the sequence has come
        num_found = num_hits - submitted.sequence.num_computed // self._kv_cache.groups.unit
        if num_found > 0:  # blocks that other requests computed meanwhile
            self._count_hits(submitted.sequence, num_found)

    def produced(self, outputs: Iterable[Any], drafts: Mapping[str, Sequence[int]], invalid: Mapping[str, int]) -> None:
        """Process vLLM's outputs of a step, and send the tokens.

        `drafts` are those that the step verified, by vLLM request; `invalid` counts the ones that are none.
        """
        for output in outputs:
            request_id = output.request_id
            submitted = self._submissions.get(request_id)
            if submitted is None or submitted.sequence.sampling is None:
                continue
            sequence = submitted.sequence
            if (
                submitted.is_plain  # this is done for each stream at each step
                and output.finish_reason is None
                and output.new_logprobs is None
                and output.new_prompt_logprobs_tensors is None
                and not output.num_nans_in_logits
                and request_id not in drafts
                and submitted.request.num_preemptions == sequence.num_preemptions
            ):
                for token_id in output.new_token_ids:
                    sequence.token_ids.append(token_id)
                    self._tokens.add_plain(sequence.request_id, token_id, sequence.choice)
            else:
                self._process(submitted, output, len(drafts.get(request_id, ())) - invalid.get(request_id, 0))
        self.send_tokens()

    def _process(self, submitted: Submitted, output: Any, num_drafts: int) -> None:
        """Process an output for one sequence: tokens, scores of the prompt, and the end."""
        sequence = submitted.sequence
        if (scores := output.new_prompt_logprobs_tensors) is not None:
            self._score(sequence, scores)
        if sequence.only_fills and str(output.finish_reason) in ("None", *FINISH_REASONS):
            return  # vLLM samples a token after every prompt; nobody gets this one
        if output.pooling_output is not None:
            self._pooled(submitted, output.pooling_output)
            return
        results = self._sampling.results(sequence, submitted.request, output)
        reason = None if output.finish_reason is None else str(output.finish_reason)
        for result in results:
            if result.failure is not None:
                self._fail(sequence, result.failure)
                return
        finish = None if reason is None else FINISH_REASONS.get(reason)
        if reason is not None and finish is None:
            self._finish(sequence.request_id)
            self._reject(sequence.request_id, f"vLLM ended the request: {reason}", permanent=False)
            return
        if num_drafts and results:
            self.num_draft_tokens += num_drafts
            self.num_right += len(results) - 1
        for number, result in enumerate(results):
            is_last = number == len(results) - 1
            self._append(submitted, result, finish if is_last else None, 0 if number else num_drafts, number > 0)

    def _append(
        self, submitted: Submitted, result: SampleResult, finish: FinishReason | None, drafted: int, followed: bool
    ) -> None:
        sequence = submitted.sequence
        request = self.by_id[sequence.request_id]
        account: KvAccount | None = None
        if len(sequence.token_ids) == sequence.num_prompt:
            account = request.account
            account.times.setdefault("first_token", self._cached.clock())
        if self._count_preemptions(submitted, request.account):
            account = request.account
        sequence.token_ids.append(result.token_id)
        if request.tells_pins:
            self._pin_prompt(request, sequence, is_last_chance=not self._is_naming())
            account, request.tells_pins = request.account, request.retention is not None
        token = Token(
            sequence.request_id,
            result.token_id,
            result.logprobs,
            account,
            finish,
            sequence.choice,
            drafted=drafted,
            followed_draft=followed,
        )
        if finish is not None and request.retention is not None and len(request.chains) == 1:
            request.held_back = token
            self._held_back.append(sequence)
            return
        self._tokens.add(token)
        if request.waiting:
            self._submit_waiting(request)
        submitted.is_plain = not request.tells_pins
        if finish is not None:
            self._end(request, sequence)

    def _pooled(self, submitted: Submitted, vector: Any) -> None:
        """Send the vector of a prompt, and end its request."""
        request = self.by_id[submitted.sequence.request_id]
        request.account.times["first_token"] = self._cached.clock()
        self._count_preemptions(submitted, request.account)
        self._emit(Embedded(submitted.sequence.request_id, vector.float().numpy().tobytes(), request.account))
        self._finish(submitted.sequence.request_id)

    def _count_preemptions(self, submitted: Submitted, account: KvAccount) -> bool:
        """Count vLLM's preemptions of a sequence that are new; return whether there are any."""
        sequence = submitted.sequence
        new = int(submitted.request.num_preemptions) - sequence.num_preemptions
        sequence.num_preemptions += new
        account.preemptions += new
        self.num_preemptions += new
        return new > 0

    def _submit_waiting(self, request: _Request) -> None:
        """Submit the other choices, whose prompt is cached by now."""
        waiting, request.waiting = request.waiting, []
        self._kv_cache.pool.unreserve(request.reserved)
        request.reserved = 0
        for sequence in waiting:
            keys, num_blocks = self._kv_cache.usable_keys(sequence), self._num_blocks_to_reserve(sequence)
            if not self._kv_cache.start(sequence, keys, num_blocks):  # its prompt was evicted: vLLM waits for blocks
                num_blocks = 0
            self._submissions.add(sequence, num_blocks)

    def _score(self, sequence: EngineSequence, scores: Any) -> None:
        """Send the log probabilities of prompt tokens that no earlier attempt sent."""
        token_ids, logprobs = scores.logprob_token_ids.tolist(), scores.logprobs.tolist()
        wanted = sequence.sampling.prompt_logprobs if sequence.sampling is not None else None
        rows = range(sequence.num_scored, sequence.num_to_score)
        prompt_logprobs = tuple(
            TokenLogprobs(logprobs[row][0], tuple(token_ids[row][1:][:wanted]), tuple(logprobs[row][1:][:wanted]))
            for row in rows
        )
        sequence.num_scored += len(prompt_logprobs)
        self._emit(PromptScored(sequence.request_id, prompt_logprobs))

    def _num_blocks_to_reserve(self, sequence: EngineSequence) -> int:
        """Return the blocks that a sequence is admitted with: its prompt, and some output."""
        num_tokens = sequence.num_tokens_reserved(self._reserve_output_tokens)
        return self._kv_cache.layout.blocks_for(max(num_tokens, sequence.num_tokens_with_items))
