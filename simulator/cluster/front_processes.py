"""Stand-in for gRPC and the fronts: carries messages between engines and to routers, late but in order.

The few decisions of a front are made here as in reality: the lender of a loan (`decode_worker/decode_attempt.py`,
`prefill_worker/service.py`), which stream ends with which (`engine/worker/front/loan_stream.py`), and the effect of a
worker's death on both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core_types import EngineSequence as Chain
from engine.messages.from_engine import (
    CacheChanged,
    CloseLoan,
    FromEngine,
    LendReady,
    LendRefused,
    LendStarting,
    LoadReport,
    OpenLoan,
    Rejected,
    ReleaseLoan,
    Token,
)
from engine.messages.to_engine import (
    Cancel,
    Generate,
    Lend,
    LendClosed,
    LendReleased,
    LoanBlocks,
    LoanFailed,
    LoanStarted,
)
from loans.account import KvAccount
from loans.messages import PlacementMark
from simulator.cluster.clock import VirtualClock
from simulator.cluster.transport import PREFIX
from simulator.cluster.worker import Listener, SimWorker

TOLD = "this worker was told to stop"


@dataclass(slots=True, eq=False)
class Attempt:
    """One placed request at its decode worker, for the router."""

    worker: SimWorker
    engine_id: str
    generate: Generate
    lender: SimWorker | None
    source: SimWorker | None
    lender_reads_store: bool
    on_token: Callable[["Attempt", Token], object]
    """Callback when the engine emits a token, before any other process sees it."""
    on_run: Callable[["Attempt", Sequence[float]], object]
    """Callback for several tokens of a run, with their times."""
    on_rejected: Callable[["Attempt", Rejected], object]
    on_lost: Callable[["Attempt"], object]
    """Callback when its worker died."""
    on_handed_over: Callable[["Attempt"], object]
    """Callback when its worker is stopping and hands it over."""
    received_at: float = 0.0
    account: KvAccount = field(default_factory=KvAccount)
    """Account as the front has it, since the first token."""


@dataclass(slots=True, eq=False)
class LoanStream:
    """One loan: a stream from borrower to lender."""

    borrower: SimWorker
    borrower_id: str
    """The borrower's id: of the request, or of the loan given."""
    lender: SimWorker
    lender_id: str
    tokens: list[int]
    source: SimWorker | None
    """Worker from which the lender may read."""
    closed: bool = False
    """Whether the borrower closed it; nothing is forwarded to it any more."""


class FrontProcesses(Listener):
    """Front processes of all workers."""

    def __init__(
        self,
        clock: VirtualClock,
        message_s: float,
        on_report: Callable[[SimWorker, CacheChanged | LoadReport], object],
        on_gaps: Callable[[Sequence[float], int], object] = lambda times, num_streams: None,
    ) -> None:
        """Create them.

        `message_s` is the delay between processes.

        `on_report` receives workers' reports when they are sent. `on_gaps` receives runs: at each time so many streams
        got a token.
        """
        self._on_gaps = on_gaps
        self._clock = clock
        self._message_s = message_s
        self._on_report = on_report
        self._attempts: dict[str, Attempt] = {}
        self._taken: dict[str, LoanStream] = {}
        """Loans taken, by the borrower's id."""
        self._by_lender: dict[str, LoanStream] = {}
        """Loans given, by the lender's id."""
        self._numbers = 0
        self.num_loans = 0

    def new_id(self, kind: str) -> str:
        """Return a new unique id."""
        self._numbers += 1
        return f"{kind}-{self._numbers}"

    def generate(self, attempt: Attempt) -> None:
        """Send a request to its worker; it arrives one message later."""
        self._clock.after(self._message_s, self._receive, attempt)

    def died(self, worker: SimWorker) -> None:
        """Report a worker's death to all with a stream to it, one message later."""
        for attempt in [a for a in self._attempts.values() if a.worker is worker]:
            self._lose(attempt)
        for stream in [*self._taken.values()]:
            if stream.lender is worker:
                self._end(stream, "the lender's worker died")
            elif stream.borrower is worker:
                self._close(stream)

    def num_requests(self, worker: SimWorker) -> int:
        """Return the requests in flight on a worker."""
        return sum(attempt.worker is worker for attempt in self._attempts.values())

    def num_lent(self, worker: SimWorker) -> int:
        """Return the loans a worker gives."""
        return sum(stream.lender is worker for stream in self._by_lender.values())

    def hand_over(self, worker: SimWorker) -> None:
        """Hand a worker's requests over to others."""
        for attempt in [a for a in self._attempts.values() if a.worker is worker]:
            worker.send(Cancel(attempt.engine_id))
            if self._attempts.pop(attempt.engine_id, None) is not None:
                self._clock.after(self._message_s, attempt.on_handed_over, attempt)

    def end_loans(self, worker: SimWorker) -> None:
        """End all loans that a worker gives."""
        for stream in [s for s in self._by_lender.values() if s.lender is worker]:
            self._end(stream, TOLD)
            worker.send(LendClosed(stream.lender_id))

    # ------------------------------------------------------------------ what engines say

    def receive(self, worker: SimWorker, message: FromEngine) -> None:
        match message:
            case Token():
                self._token(message)
            case CacheChanged() | LoadReport():
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
        attempt.worker.send(attempt.generate)

    def _lose(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt.engine_id, None)
        self._clock.after(self._message_s, attempt.on_lost, attempt)

    # ------------------------------------------------------------------ loans

    def _open(self, worker: SimWorker, message: OpenLoan) -> None:
        """Open a loan: with the lender that the router named, or for a loan given with its source."""
        mark, source, first, reads_store = PlacementMark(), None, message.first_block, False
        if (attempt := self._attempts.get(message.request_id)) is not None:
            lender, mark = attempt.lender, attempt.generate.mark
            source = attempt.source if message.may_compute else None
            reads_store = attempt.lender_reads_store and message.may_compute
            tokens = [*attempt.generate.prompt, *attempt.generate.emitted]
            priority = attempt.generate.priority
        else:
            request = self._by_lender[message.request_id]
            lender, tokens, priority = request.source, request.tokens, 0
        assert lender is not None
        self.num_loans += 1
        wanted = tokens[: message.end_block * worker.spec.layout.block_tokens]
        stream = LoanStream(worker, message.request_id, lender, self.new_id("loan"), wanted, source)
        self._taken[stream.borrower_id] = self._by_lender[stream.lender_id] = stream
        lend = Lend(
            loan_id=stream.lender_id,
            token_ids=wanted,
            first_block=first,
            cache_salt="",
            may_compute=message.may_compute,
            priority=priority,
            mark=mark,
            borrow=source is not None,
            reads_store=reads_store,
        )
        self._clock.after(self._message_s, self._ask, stream, lend)

    def _ask(self, stream: LoanStream, lend: Lend) -> None:
        if not stream.lender.alive:
            self._end(stream, "the worker has no server")
        elif stream.lender.draining and lend.may_compute:
            self._end(stream, TOLD)
        else:
            stream.lender.send(lend)

    def _answer(self, message: LendStarting | LendReady | LendRefused) -> None:
        stream = self._by_lender.get(message.loan_id)
        if stream is None:
            return  # the borrower closed it before the lender knew
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
            stream.borrower.send(message)

    def _end(self, stream: LoanStream, reason: str) -> None:
        """End a stream from the lender's side."""
        self._by_lender.pop(stream.lender_id, None)
        self._forward(stream, LoanFailed(stream.borrower_id, reason))

    def _close(self, stream: LoanStream) -> None:
        """Close a stream from the borrower's side; the lender releases everything."""
        self._forget(stream)
        self._send(stream.lender, LendClosed(stream.lender_id))

    def _forget(self, stream: LoanStream) -> None:
        stream.closed = True
        self._by_lender.pop(stream.lender_id, None)
        if self._taken.get(stream.borrower_id) is stream:
            del self._taken[stream.borrower_id]

    def _send(self, worker: SimWorker, message: LendReleased | LendClosed) -> None:
        self._clock.after(self._message_s, worker.send, message)
