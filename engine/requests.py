"""The requests this engine serves: admitted or rejected at once, borrowing or running, until they finish.

admitted ──no loan──────────────▶ running ──▶ finished
    └──borrowing──loan is over──────┘ │ ▲
                                      │ └──blocks for all its tokens──┐
                                      └──somebody lacks a block──▶ preempted
(a cancel ends any of them; a request that does not fit now is rejected, never queued: the router waits)

Who is borrowing or running holds blocks, and a promise of those it was admitted with and has not taken yet. Who is
preempted holds none. It restarts with all its tokens, computes in chunks what the prefix cache has lost of them, and
goes on after the last one: what it emitted is not emitted again, and what it will emit is what it would have been,
since sampling is keyed by (seed, position). Victims are chosen where no step runs, at `begin_step`; who they are, and
who restarts when, stands in `engine/preemption.py`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.bookkeeper import Bookkeeper
from engine.keys import root_key
from engine.lending.borrowing import BorrowingDesk, ReadLanded
from engine.messages import Failed, FromEngine, Generate, KvAccount, Rejected, Token
from engine.residency import Residency
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
        reserve_output_tokens: int,
    ) -> None:
        """`next_arrival` numbers arrivals and turns."""
        self.residency = Residency(books, reserve_output_tokens, next_arrival)
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

    def admit(self, message: Generate) -> None:
        """Start it with blocks promised for its prompt and some output, or say Rejected."""
        layout, pool = self._books.layout, self._books.pool
        sequence = self._sequence(message, message.sampling)
        total = layout.blocks_for(sequence.max_num_tokens)
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
        keys = self._books.usable_keys(sequence)
        if not self.residency.admit(sequence, keys):
            needed = self.residency.num_promised_blocks(sequence)
            reason = f"{needed} KV blocks needed, {pool.num_available} available now"
            if waiting := len(self.residency.preempted):
                reason += f", {waiting} preempted requests wait for some"
            self._reject(message.request_id, reason, permanent=False)
            return
        account = KvAccount(reused_blocks=len(sequence.blocks), times={"admitted": time.monotonic()})
        borrowing = message.borrow and len(sequence.blocks) < len(keys)
        self._requests[message.request_id] = _Request(sequence, account, borrowing)
        if borrowing:
            self.loans.open(sequence, len(keys), account)
        else:
            self._run(sequence, account)

    def computing(self, sequence: Sequence, now: float) -> None:
        """A step begins to compute some of the request's tokens."""
        self._requests[sequence.request_id].account.times.setdefault("compute_started", now)

    def append(self, sequence: Sequence, sampled: Sampled) -> None:
        """The request's next token is known, or that there can be none."""
        if sampled.failure is not None:
            self._emit(Failed(sequence.request_id, sampled.failure))
            self._finish(sequence.request_id)
            return
        account = self._requests[sequence.request_id].account
        first = sequence.num_tokens == sequence.num_prompt
        news = first or account.preemptions < sequence.num_preemptions
        sequence.token_ids.append(sampled.token_id)
        sequence.turn = self._next_arrival()
        if first:
            account.times["first_token"] = time.monotonic()
        account.preemptions, account.recomputed_tokens = sequence.num_preemptions, sequence.num_recomputed
        finish = self._finish_reason(sequence, sampled.token_id)
        self._emit(Token(sequence.request_id, sampled.token_id, sampled.logprobs, account if news else None, finish))
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
        # With a grammar and ignore_eos the end token is sampled only where no other may follow (see the sampler).
        if token_id in self._eos_token_ids and (not sampling.ignore_eos or sampling.structured is not None):
            return FinishReason.STOP
        if sequence.num_sampled >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _run(self, sequence: Sequence, account: KvAccount) -> None:
        """What is not here now is computed here."""
        self.residency.run(sequence)
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
            self._run(sequence, request.account)

    def _finish(self, request_id: str) -> None:
        sequence = self._requests.pop(request_id).sequence
        self.residency.drop(sequence)
        self._books.finish(sequence)

    def _reject(self, request_id: str, reason: str, permanent: bool) -> None:
        self._emit(Rejected(request_id, reason, permanent))
