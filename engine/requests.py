"""The requests this engine serves: admitted or rejected at once, borrowing or running, until they finish.

admitted ──no loan──────────────▶ running ──▶ finished
    └──borrowing──loan is over──────┘
(a cancel ends any of them; a request that does not fit now is rejected, never queued: the router waits)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.bookkeeper import Bookkeeper
from engine.keys import block_keys, root_key
from engine.lending.borrowing import BorrowingDesk, ReadLanded
from engine.messages import FromEngine, Generate, KvAccount, Rejected, Token
from engine.vocabulary import FinishReason, Sampled, SamplingParams, Sequence
from kvtransfer.transport import Transport


@dataclass(slots=True)
class _Request:
    sequence: Sequence
    account: KvAccount
    borrowing: bool


class RequestDesk:
    """Requests by id, and the loans taken for them."""

    def __init__(
        self,
        books: Bookkeeper,
        transport: Transport,
        model_fingerprint: bytes,
        eos_token_ids: frozenset[int],
        emit: Callable[[FromEngine], None],
        post: Callable[[ReadLanded], None],
        next_arrival: Callable[[], int],
    ) -> None:
        self.loans = BorrowingDesk(books, transport, emit, post, self._on_loan_over)
        self._books = books
        self._model_fingerprint = model_fingerprint
        self._eos_token_ids = eos_token_ids
        self._emit = emit
        self._next_arrival = next_arrival
        self._requests: dict[str, _Request] = {}

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def sequences(self) -> list[Sequence]:
        """Of all requests: who claims which blocks."""
        return [request.sequence for request in self._requests.values()]

    def running(self) -> list[Sequence]:
        """Those that may be computed."""
        return [request.sequence for request in self._requests.values() if not request.borrowing]

    def admit(self, message: Generate) -> None:
        """Start it with all its blocks promised, or say Rejected."""
        layout, pool = self._books.layout, self._books.pool
        sequence = self._sequence(message, message.sampling)
        total = layout.blocks_for(len(message.prompt) + message.sampling.max_tokens)
        if message.request_id in self._requests:
            self._reject(message.request_id, "a request of this id is running here", permanent=True)
            return
        if not sequence.token_ids or len(message.emitted) >= message.sampling.max_tokens:
            reason = f"nothing to compute: {len(message.prompt)} prompt tokens, {len(message.emitted)} emitted"
            self._reject(message.request_id, reason, permanent=True)
            return
        if total > pool.num_blocks:
            reason = f"prompt + max_tokens need {total} KV blocks, the pool has {pool.num_blocks}"
            self._reject(message.request_id, reason, permanent=True)
            return
        # The block of the last token is never taken from elsewhere: its logits are needed here.
        num_usable = (sequence.num_tokens - 1) // layout.block_tokens
        keys = block_keys(sequence.root, sequence.token_ids[: num_usable * layout.block_tokens], layout.block_tokens)
        if not self._books.start(sequence, keys, total):
            reason = f"{total} KV blocks needed, {pool.num_available} available now"
            self._reject(message.request_id, reason, permanent=False)
            return
        account = KvAccount(reused_blocks=len(sequence.blocks), times={"admitted": time.monotonic()})
        borrowing = message.borrow and len(sequence.blocks) < num_usable
        self._requests[message.request_id] = _Request(sequence, account, borrowing)
        if borrowing:
            self.loans.open(sequence, num_usable, account)
        else:
            self._account_compute(sequence, account)

    def computing(self, sequence: Sequence, now: float) -> None:
        """A step begins to compute some of the request's tokens."""
        self._requests[sequence.request_id].account.times.setdefault("compute_started", now)

    def append(self, sequence: Sequence, sampled: Sampled) -> None:
        """The request's next token is known."""
        request = self._requests[sequence.request_id]
        first = sequence.num_tokens == sequence.num_prompt
        sequence.token_ids.append(sampled.token_id)
        if first:
            request.account.times["first_token"] = time.monotonic()
        finish = self._finish_reason(sequence, sampled.token_id)
        account = request.account if first else None
        self._emit(Token(sequence.request_id, sampled.token_id, sampled.logprobs, account, finish))
        if finish is not None:
            self._finish(sequence.request_id)

    def cancel(self, request_id: str) -> None:
        """Nobody wants the rest."""
        if request_id in self._requests:
            self.loans.cancel(request_id)
            self._finish(request_id)

    def _sequence(self, message: Generate, sampling: SamplingParams) -> Sequence:
        tokens = [*message.prompt, *message.emitted]
        return Sequence(
            request_id=message.request_id,
            token_ids=tokens,
            num_prompt=len(tokens),
            root=root_key(self._model_fingerprint, message.cache_salt),
            sampling=sampling,
            priority=message.priority,
            arrival=self._next_arrival(),
            num_emitted_before=len(message.emitted),
        )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.sampling
        assert sampling is not None
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in self._eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if sequence.num_sampled >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _account_compute(self, sequence: Sequence, account: KvAccount) -> None:
        """What is not here now is computed here."""
        total = self._books.layout.blocks_for(sequence.num_prompt)
        account.computed_blocks = total - account.reused_blocks - account.moved_blocks
        account.computed_tokens = sequence.num_prompt - sequence.num_computed

    def _on_loan_over(self, sequence: Sequence, lost_blocks: bool) -> None:
        request = self._requests[sequence.request_id]
        request.borrowing = False
        if lost_blocks:
            self._finish(sequence.request_id)
            reason = "blocks are quarantined for a silent lender and no others are available"
            self._reject(sequence.request_id, reason, permanent=False)
        else:
            self._account_compute(sequence, request.account)

    def _finish(self, request_id: str) -> None:
        self._books.finish(self._requests.pop(request_id).sequence)

    def _reject(self, request_id: str, reason: str, permanent: bool) -> None:
        self._emit(Rejected(request_id, reason, permanent))
