"""Stand-in for the fronts: carries messages between engines and routers, late but in order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core_types import EngineSequence as Chain
from engine.messages.from_engine import CacheChanged, FromEngine, LoadReport, Rejected, StepTokens, Token
from engine.messages.to_engine import Cancel, Generate
from loans.loan import KvAccount
from sizing.cluster.clock import VirtualClock
from sizing.cluster.worker import Listener, SimWorker


@dataclass(slots=True, eq=False)
class Attempt:
    """One placed request at its decode worker, for the router."""

    worker: SimWorker
    engine_id: str
    generate: Generate
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
        self._numbers = 0

    def new_id(self, kind: str) -> str:
        """Return a new unique id."""
        self._numbers += 1
        return f"{kind}-{self._numbers}"

    def generate(self, attempt: Attempt) -> None:
        """Send a request to its worker; it arrives one message later."""
        self._clock.after(self._message_s, self._receive, attempt)

    def died(self, worker: SimWorker) -> None:
        """Report a worker's death to the routers of its requests, one message later."""
        for attempt in [a for a in self._attempts.values() if a.worker is worker]:
            self._lose(attempt)

    def num_requests(self, worker: SimWorker) -> int:
        """Return the requests in flight on a worker."""
        return sum(attempt.worker is worker for attempt in self._attempts.values())

    def hand_over(self, worker: SimWorker) -> None:
        """Hand a worker's requests over to others."""
        for attempt in [a for a in self._attempts.values() if a.worker is worker]:
            worker.send(Cancel(attempt.engine_id))
            if self._attempts.pop(attempt.engine_id, None) is not None:
                self._clock.after(self._message_s, attempt.on_handed_over, attempt)

    # ------------------------------------------------------------------ what engines say

    def receive(self, worker: SimWorker, message: FromEngine) -> None:
        match message:
            case StepTokens():
                for token in message.each():
                    self._token(token)
            case CacheChanged() | LoadReport():
                self._on_report(worker, message)
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
