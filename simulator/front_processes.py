"""Stands where gRPC and the fronts do: carries what engines say to each other and to routers, late, but in order.

What a front decides is little, and is here what it is there: whom a loan is asked of (`decode_worker/decode_attempt.py`,
`prefill_worker/service.py`), which stream ends with which (`engine/worker/loan_stream.py`), and what becomes of both
when a worker dies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.core_types import Sequence as Chain
from engine.messages import (
    CacheChanged,
    Cancel,
    CloseLoan,
    FromEngine,
    Generate,
    KvAccount,
    Lend,
    LendClosed,
    LendReady,
    LendRefused,
    LendReleased,
    LendStarting,
    Load,
    LoanBlocks,
    LoanFailed,
    LoanStarted,
    OpenLoan,
    PlacementMark,
    Rejected,
    ReleaseLoan,
    Token,
)
from simulator.clock import VirtualClock
from simulator.transport import PREFIX
from simulator.worker import Listener, SimWorker

TOLD = "this worker was told to stop"


@dataclass(slots=True, eq=False)
class Attempt:
    """One placed request at its decode worker, for whoever placed it."""

    worker: SimWorker
    engine_id: str
    generate: Generate
    lender: SimWorker | None
    source: SimWorker | None
    on_token: Callable[["Attempt", Token], object]
    """Called when the engine says it, which is before anybody hears of it."""
    on_run: Callable[["Attempt", Sequence[float]], object]
    """Likewise of several, that were said at these times."""
    on_rejected: Callable[["Attempt", Rejected], object]
    on_lost: Callable[["Attempt"], object]
    """Its worker died."""
    on_handed_over: Callable[["Attempt"], object]
    """Its worker was told to stop, and will not go on with it."""
    received_at: float = 0.0
    account: KvAccount = field(default_factory=KvAccount)
    """As the front has it: since the first token."""


@dataclass(slots=True, eq=False)
class LoanStream:
    """One loan: a stream from borrower to lender."""

    borrower: SimWorker
    borrower_id: str
    """What the borrower's engine calls it: the request, or the loan given, that it is for."""
    lender: SimWorker
    lender_id: str
    tokens: list[int]
    source: SimWorker | None
    """From whom the lender may read."""
    closed: bool = False
    """By the borrower: nothing is forwarded to it any more."""


class FrontProcesses(Listener):
    """Of all workers."""

    def __init__(
        self,
        clock: VirtualClock,
        message_s: float,
        on_report: Callable[[SimWorker, CacheChanged | Load], object],
        on_gaps: Callable[[Sequence[float], int], object] = lambda times, num_streams: None,
    ) -> None:
        """`message_s`: from one process to another. `on_report` hears what a worker says to routers, when it says it.
        `on_gaps` hears of runs: at each of these times so many streams got a token."""
        self._on_gaps = on_gaps
        self._clock = clock
        self._message_s = message_s
        self._on_report = on_report
        self._attempts: dict[str, Attempt] = {}
        self._taken: dict[str, LoanStream] = {}
        """By the borrower's id."""
        self._given: dict[str, LoanStream] = {}
        """By the lender's."""
        self._numbers = 0
        self.num_loans = 0

    def new_id(self, kind: str) -> str:
        """Nobody else's."""
        self._numbers += 1
        return f"{kind}-{self._numbers}"

    def generate(self, attempt: Attempt) -> None:
        """A router sends it; it arrives a message later."""
        self._clock.after(self._message_s, self._receive, attempt)

    def died(self, worker: SimWorker) -> None:
        """Everybody it had a stream with learns of it a message later."""
        for attempt in [a for a in self._attempts.values() if a.worker is worker]:
            self._lose(attempt)
        for stream in [*self._taken.values()]:
            if stream.lender is worker:
                self._end(stream, "the lender's worker died")
            elif stream.borrower is worker:
                self._close(stream)

    def num_requests(self, worker: SimWorker) -> int:
        """Under way there."""
        return sum(attempt.worker is worker for attempt in self._attempts.values())

    def num_lent(self, worker: SimWorker) -> int:
        """Loans that it gives."""
        return sum(stream.lender is worker for stream in self._given.values())

    def hand_over(self, worker: SimWorker) -> None:
        """Its requests go on elsewhere, from what they have."""
        for attempt in [a for a in self._attempts.values() if a.worker is worker]:
            worker.tell(Cancel(attempt.engine_id))
            if self._attempts.pop(attempt.engine_id, None) is not None:
                self._clock.after(self._message_s, attempt.on_handed_over, attempt)

    def end_loans(self, worker: SimWorker) -> None:
        """That it gives."""
        for stream in [s for s in self._given.values() if s.lender is worker]:
            self._end(stream, TOLD)
            worker.tell(LendClosed(stream.lender_id))

    # ------------------------------------------------------------------ what engines say

    def hear(self, worker: SimWorker, message: FromEngine) -> None:
        match message:
            case Token():
                self._token(message)
            case CacheChanged() | Load():
                self._on_report(worker, message)
            case OpenLoan():
                self._open(worker, message)
            case ReleaseLoan(borrower_id, first, count):
                if (stream := self._taken.get(borrower_id)) is not None:
                    self._send(stream.lender, LendReleased(stream.lender_id, first, count))
            case CloseLoan(borrower_id):
                if (stream := self._taken.get(borrower_id)) is not None:
                    self._close(stream)
            case LendStarting() | LendReady() | LendRefused():
                self._answer(message)
            case Rejected(request_id):
                attempt = self._attempts.pop(request_id)
                attempt.on_rejected(attempt, message)
            case _:
                raise AssertionError(f"unexpected {message!r}")

    def hear_run(self, worker: SimWorker, chains: Sequence[Chain], times: Sequence[float]) -> None:
        self._on_gaps(times, len(chains))
        for chain in chains:
            attempt = self._attempts[chain.request_id]
            attempt.on_run(attempt, times)

    def _token(self, token: Token) -> None:
        attempt = self._attempts[token.request_id]
        if token.account is not None:
            attempt.account = token.account
        if token.finish is not None:
            del self._attempts[token.request_id]
        attempt.on_token(attempt, token)

    def _receive(self, attempt: Attempt) -> None:
        if not attempt.worker.alive:
            self._lose(attempt)
            return
        if attempt.worker.draining:
            self._clock.after(self._message_s, attempt.on_handed_over, attempt)
            return
        attempt.received_at = self._clock.now
        self._attempts[attempt.engine_id] = attempt
        attempt.worker.tell(attempt.generate)

    def _lose(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt.engine_id, None)
        self._clock.after(self._message_s, attempt.on_lost, attempt)

    # ------------------------------------------------------------------ loans

    def _open(self, worker: SimWorker, message: OpenLoan) -> None:
        """Who is asked: the lender that the router named for a request; for a loan given, the source it named."""
        mark, source, first = PlacementMark(), None, message.first_block
        if (attempt := self._attempts.get(message.request_id)) is not None:
            lender, mark = attempt.lender, attempt.generate.mark
            source = attempt.source if message.may_compute else None
            tokens = [*attempt.generate.prompt, *attempt.generate.emitted]
            priority = attempt.generate.priority
        else:
            given = self._given[message.request_id]
            lender, tokens, priority = given.source, given.tokens, 0
        assert lender is not None
        self.num_loans += 1
        wanted = tokens[: message.end_block * worker.spec.layout.block_tokens]
        stream = LoanStream(worker, message.request_id, lender, self.new_id("loan"), wanted, source)
        self._taken[stream.borrower_id] = self._given[stream.lender_id] = stream
        lend = Lend(stream.lender_id, wanted, first, "", message.may_compute, priority, mark, borrow=source is not None)
        self._clock.after(self._message_s, self._ask, stream, lend)

    def _ask(self, stream: LoanStream, lend: Lend) -> None:
        if not stream.lender.alive:
            self._end(stream, "nobody is there")
        elif stream.lender.draining and lend.may_compute:
            self._end(stream, TOLD)
        else:
            stream.lender.tell(lend)

    def _answer(self, message: LendStarting | LendReady | LendRefused) -> None:
        stream = self._given.get(message.loan_id)
        if stream is None:
            return  # the borrower closed it, and the lender did not know yet
        match message:
            case LendStarting(_, end, cached_end, queued_ms):
                endpoint = PREFIX + stream.lender.worker_id.encode()
                self._forward(stream, LoanStarted(stream.borrower_id, endpoint, end, cached_end, queued_ms))
            case LendReady(_, first, block_ids, fingerprints, fetched):
                self._forward(stream, LoanBlocks(stream.borrower_id, first, block_ids, fingerprints, fetched))
            case LendRefused(_, reason, _):
                self._end(stream, reason)

    def _forward(self, stream: LoanStream, message: LoanStarted | LoanBlocks | LoanFailed) -> None:
        self._clock.after(self._message_s, self._deliver, stream, message)

    def _deliver(self, stream: LoanStream, message: LoanStarted | LoanBlocks | LoanFailed) -> None:
        if not stream.closed:
            if isinstance(message, LoanFailed):
                self._forget(stream)
            stream.borrower.tell(message)

    def _end(self, stream: LoanStream, reason: str) -> None:
        """From the lender's side."""
        self._given.pop(stream.lender_id, None)
        self._forward(stream, LoanFailed(stream.borrower_id, reason))

    def _close(self, stream: LoanStream) -> None:
        """From the borrower's side: the lender lets go of everything."""
        self._forget(stream)
        self._send(stream.lender, LendClosed(stream.lender_id))

    def _forget(self, stream: LoanStream) -> None:
        stream.closed = True
        self._given.pop(stream.lender_id, None)
        if self._taken.get(stream.borrower_id) is stream:
            del self._taken[stream.borrower_id]

    def _send(self, worker: SimWorker, message: LendReleased | LendClosed) -> None:
        self._clock.after(self._message_s, worker.tell, message)
