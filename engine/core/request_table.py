"""Requests of an engine by id, as far as they do not depend on how the engine steps.

`engine/core/request_manager.py` (Tandem's own scheduler) and `engine/backends/vllm/requests.py` (vLLM's) are its
subclasses: one set of refusals, of ends, and of what an account says.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.core.load_reports import RunningSequences
from engine.core_types import EngineSequence, RequestFailure
from engine.messages.from_engine import Failed, Filled, FromEngine, Rejected, StepTokens
from engine.messages.to_engine import Generate
from engine.model_runner import ModelInfo
from engine.sampling.parallel_sampling import chains_of, is_complete, num_blocks_at_most, without_tail
from kvcache.block_keys import BlockKey, root_key
from kvcache.kv_stats import POOL
from kvcache.kv_view import KvView, belongs
from kvcache.pins import Retention
from loans.account import KvAccount
from loans.borrower_manager import BorrowerManager
from loans.loan import BorrowRequest


@dataclass(slots=True)
class Request:
    """One request that is not over."""

    chains: dict[int, EngineSequence]
    """Sequences that are not over, by choice."""
    account: KvAccount
    to_store: bool
    """Whether its blocks are written to the shared store, where it has no output."""
    retention: Retention | None
    """Time for which the prompt's blocks are pinned."""


R = TypeVar("R", bound=Request)


@dataclass(frozen=True, slots=True)
class TableParts:
    """Parts of an engine core that its requests use."""

    kv_cache: KvView
    borrower_manager: BorrowerManager
    model_fingerprint: bytes
    info: ModelInfo
    emit: Callable[[FromEngine], None]
    next_arrival: Callable[[], int]
    """Function that numbers arrivals and turns."""
    reserve_output_tokens: int


class RequestTable(ABC, Generic[R]):
    """Requests that are not over, and the loans taken for them."""

    running_set: RunningSequences

    def __init__(self, parts: TableParts) -> None:
        self._kv_cache = parts.kv_cache
        self._cached = parts.kv_cache.cached
        self._borrower_manager = parts.borrower_manager
        self._model_fingerprint = parts.model_fingerprint
        self._eos_token_ids = parts.info.eos_token_ids
        self._adapters = parts.info.adapter_fingerprints
        self._reads_media = parts.info.reads_media
        self._send = parts.emit
        self._tokens = StepTokens.none()
        """Tokens that are not sent yet."""
        self._next_arrival = parts.next_arrival
        self._reserve_output_tokens = parts.reserve_output_tokens
        self.by_id: dict[str, R] = {}
        """Requests by their id."""

    @property
    def num_requests(self) -> int:
        return len(self.by_id)

    @property
    def num_sequences(self) -> int:
        return sum(len(request.chains) for request in self.by_id.values())

    @property
    def sequences(self) -> list[EngineSequence]:
        """Sequences of all requests, which hold blocks."""
        return [chain for request in self.by_id.values() for chain in request.chains.values()]

    @property
    def num_reserved(self) -> int:
        """Number of reserved blocks that no sequence counts as its own."""
        return 0

    def has(self, sequence: EngineSequence) -> bool:
        """Return whether the sequence is not over."""
        request = self.by_id.get(sequence.request_id)
        return request is not None and request.chains.get(sequence.choice) is sequence

    def send_tokens(self) -> None:
        """Send the tokens sampled since the last call; to be called after each step."""
        if self._tokens.token_ids:
            tokens, self._tokens = self._tokens, StepTokens.none()
            self._send(tokens)

    def _emit(self, message: FromEngine) -> None:
        """Send a message about a request, after its tokens."""
        self.send_tokens()
        self._send(message)

    # ------------------------------------------------------------------ from the front

    def admit(self, message: Generate) -> None:
        """Start a request with blocks reserved for its prompt and some output, or send Rejected."""
        whole, message = message, without_tail(message, self._cached.layout)
        root = root_key(self._model_fingerprint, message.cache_salt, message.adapter)
        chains = chains_of(message, root, self._next_arrival)
        for chain in chains:
            chain.tail = tuple(whole.prompt[len(message.prompt) :])
        if refusal := self._unsupported(message) or self._impossible(message, chains):
            self._reject(message.request_id, refusal, permanent=True)
            return
        lead, width = chains[0], self._cached.layout.block_tokens
        if message.keys and belongs(message.keys, root, message.prompt, width, message.items):
            for chain in chains:
                chain.given_keys = message.keys[: len(message.prompt) // width]
        keys = self._kv_cache.usable_keys(lead)
        lead.given_keys = max(lead.given_keys, tuple(keys), key=len)
        request = self._request(message, chains)
        if lack := self._start(request, chains, keys):
            self._reject(message.request_id, lack, permanent=False)
            return
        num_cached = lead.num_computed // self._cached.layout.block_tokens
        self._cached.counts.looked(POOL, len(keys), num_cached)
        account = request.account
        account.reused_blocks, account.times["admitted"] = num_cached, self._cached.clock()
        self.by_id[message.request_id] = request
        self._admitted(request, lead)
        block_range = self._kv_cache.range_of(lead, keys)
        wanted = BorrowRequest(
            lead, keys, block_range, message.lender, account, self, message.reads_store, message.mark, message.log_id
        )
        if not self._borrower_manager.take(wanted):
            self.loan_over(lead, lost_blocks=False)

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Cancel a request, or one choice that has a token already."""
        if (request := self.by_id.get(request_id)) is None:
            return
        if choice is None:
            self._borrower_manager.cancel(request_id)
            self._finish(request_id)
        elif (chain := request.chains.get(choice)) is not None and self._has_begun(request, chain):
            self._end(request, chain)

    def _impossible(self, message: Generate, chains: list[EngineSequence]) -> str:
        """Return why a request can never be served here; empty where it can."""
        pool = self._cached.pool
        if message.request_id in self.by_id:
            return "a request of this id is running here"
        if message.adapter and message.adapter not in self._adapters:
            return f"this worker has no adapter {message.adapter.hex()}"
        if message.items and not self._reads_media:
            return "items: this worker's engine reads no media"
        if not message.prompt or not chains or any(is_complete(chain) for chain in chains):
            return f"nothing to compute: {len(message.prompt)} prompt tokens, {len(message.emitted)} emitted"
        if (total := num_blocks_at_most(chains, self._cached.layout)) > pool.num_blocks:
            tokens = "max_tokens" if len(chains) == 1 else f"{len(chains)} x max_tokens"
            return f"prompt + {tokens} need {total} KV blocks, the pool has {pool.num_blocks}"
        return ""

    # ------------------------------------------------------------------ the loan's owner

    def loan_bound(self, sequence: EngineSequence, first: int) -> None:
        """Process blocks from index `first` that a loan has bound, while the request is computed meanwhile."""

    def loan_hedged(self, sequence: EngineSequence) -> bool:
        """Return whether the request is computed although its loan is open, because the lender is silent."""
        return False

    @abstractmethod
    def loan_over(self, sequence: EngineSequence, lost_blocks: bool) -> None:
        """Compute the blocks that the loan did not bring."""

    def _lost(self, sequence: EngineSequence) -> None:
        """End a request whose blocks a posted read may still write, for lack of others."""
        self._finish(sequence.request_id)
        reason = "blocks are quarantined for a silent lender and no other blocks are free"
        self._reject(sequence.request_id, reason, permanent=False)

    def _count_left(self, sequence: EngineSequence) -> None:
        """Count the blocks and tokens that are left to compute."""
        account = self.by_id[sequence.request_id].account
        total = -(-sequence.num_prompt // self._cached.layout.block_tokens)
        brought = account.restored_blocks + account.store_blocks + account.moved_blocks
        account.computed_blocks = total - account.reused_blocks - brought
        account.computed_tokens = sequence.num_prompt - sequence.num_computed

    def _count_hits(self, sequence: EngineSequence, num_blocks: int) -> None:
        """Count blocks that others computed since the request was admitted as reused instead of computed.

        The account is of the lead, whose blocks all choices share; it has nothing of the tokens that an earlier attempt
        emitted of another choice.
        """
        request = self.by_id[sequence.request_id]
        if sequence is not next(iter(request.chains.values())):
            return
        account = request.account
        self._cached.counts.found(POOL, num_blocks)
        account.reused_blocks += num_blocks
        account.computed_blocks -= num_blocks
        account.computed_tokens -= num_blocks * self._cached.layout.block_tokens

    # ------------------------------------------------------------------ what a subclass says

    def _unsupported(self, message: Generate) -> str:
        """Return why this engine cannot serve such a request, naming the field; empty where it can."""
        return ""

    @abstractmethod
    def _request(self, message: Generate, chains: list[EngineSequence]) -> R:
        """Return the record of a request, which has nothing yet."""

    @abstractmethod
    def _start(self, request: R, chains: list[EngineSequence], keys: list[BlockKey]) -> str:
        """Give the first sequence its cached blocks of `keys`, and reserve the rest for all of them.

        Returns the reason where they do not fit now; empty where they do.
        """

    def _admitted(self, request: R, lead: EngineSequence) -> None:
        """Process that a request has its blocks and is in the table."""

    def _has_begun(self, request: R, chain: EngineSequence) -> bool:
        """Return whether a choice may be ended by itself."""
        return True

    def _leaves(self, request: R, chain: EngineSequence) -> None:
        """Process that a sequence is over, before it gives its blocks back."""

    def _over(self, request: R) -> None:
        """Process that a request is over, before its sequences are."""

    # ------------------------------------------------------------------ ends

    def _fill(self, sequence: EngineSequence) -> None:
        """End a request without output, whose blocks are all there."""
        request = self.by_id[sequence.request_id]
        account = request.account
        account.times.setdefault("first_token", self._cached.clock())
        if request.retention is not None:
            self._pin(request, sequence, request.retention)
        if request.to_store:
            account.stored_blocks = self._cached.share(sequence.keys)
        self._emit(Filled(sequence.request_id, account))
        self._finish(sequence.request_id)

    def _pin(self, request: R, sequence: EngineSequence, retention: Retention) -> None:
        """Pin the blocks of a request's prompt, which are all named."""
        pinned = self._cached.pins.pin(self._kv_cache.prompt_names(sequence), retention)
        request.account.pinned_blocks, request.account.pins_gave_way = pinned

    def _fail(self, sequence: EngineSequence, failure: RequestFailure) -> None:
        self._emit(Failed(sequence.request_id, failure))
        self._finish(sequence.request_id)

    def _finish(self, request_id: str) -> None:
        request = self.by_id.pop(request_id)
        self._over(request)
        for chain in request.chains.values():
            self._leaves(request, chain)
            self._kv_cache.finish(chain)

    def _end(self, request: R, chain: EngineSequence) -> None:
        """End this choice, and the request with its last choice."""
        if len(request.chains) == 1:
            self._finish(chain.request_id)
            return
        del request.chains[chain.choice]
        self._leaves(request, chain)
        self._kv_cache.finish(chain)

    def _reject(self, request_id: str, reason: str, permanent: bool) -> None:
        self._emit(Rejected(request_id, reason, permanent))
