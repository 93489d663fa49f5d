"""Fronts of simulated workers, and the links of routers to them: messages come late but in order.

Tokens between a request's first and last are sent with the last, or when the worker is lost: no router acts on them.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.errors import Draining, Overloaded, ServiceError, Unavailable
from cluster.fair_turns import Waker
from engine.core_types import EngineSequence as Chain
from engine.messages.from_engine import CacheChanged, FromEngine, LoadReport, Rejected, StepTokens, Token
from engine.messages.to_engine import Cancel
from loans.account import KvAccount
from protos import decode_pb2
from protos import inference_pb2 as pb
from sizing.cluster.clock import VirtualClock
from sizing.cluster.runner import output_token
from sizing.cluster.worker import Listener, SimWorker
from worker.requests.placed_request import engine_request
from worker.requests.receipt import build_receipt
from workloads.request import Outcome
from workloads.results import LatencyHistogram


@dataclass(slots=True, eq=False)
class Attempt:
    """One placed request at its decode worker."""

    worker: SimWorker
    engine_id: str
    request: decode_pb2.DecodeRequest
    outcome: Outcome
    """Outcome as its client sees it."""
    call: object = None
    """Handle of the worker's `requests`."""
    received_at: float = 0.0
    account: KvAccount = field(default_factory=KvAccount)
    """Account as the front has it, since the first token."""
    num_unsent: int = 0
    """Tokens that the router does not have."""
    messages: list[bytes] = field(default_factory=list)
    """Messages that arrived at the router, which has not taken them."""
    is_over: bool = False
    failure: ServiceError | None = None
    waker: Waker = field(default_factory=Waker)


class SimLink:
    """Link of one router to one worker, a `WorkerLink`."""

    failure: ServiceError | None = None
    connected = True
    broken = False
    idle = True

    def __init__(self, fronts: "FrontProcesses", worker: SimWorker, outcomes: dict[str, Outcome]) -> None:
        """Create the link; `outcomes` are those of the router's requests."""
        self._fronts, self._worker, self._outcomes = fronts, worker, outcomes

    async def generate(self, request: decode_pb2.DecodeRequest, timeout_s: float) -> AsyncGenerator[Sequence[bytes]]:
        """Yield serialised GenerateResponses; no deadline ends a request that has begun."""
        attempt = self._fronts.generate(self._worker, request, self._outcomes[request.request_id])
        while True:
            if attempt.messages:
                messages, attempt.messages = attempt.messages, []
                yield messages
            elif attempt.failure is not None:
                raise attempt.failure
            elif attempt.is_over:
                return
            else:
                await attempt.waker.sleep()

    def break_off(self, failure: ServiceError) -> None:
        """Do nothing: what runs there ends with the worker."""


class FrontProcesses(Listener):
    """Front processes of all workers."""

    def __init__(
        self, clock: VirtualClock, message_s: float, on_report: Callable[[SimWorker, CacheChanged | LoadReport], object]
    ) -> None:
        """Create them.

        `message_s` is the delay between processes. `on_report` receives workers' reports when they are sent.
        """
        self._clock = clock
        self._message_s = message_s
        self._on_report = on_report
        self._attempts: dict[str, Attempt] = {}
        self._numbers = 0
        self.gaps = LatencyHistogram()
        """Inter-token latencies as clients see them."""

    def generate(self, worker: SimWorker, request: decode_pb2.DecodeRequest, outcome: Outcome) -> Attempt:
        """Send a request to its worker; it arrives one message later."""
        self._numbers += 1
        attempt = Attempt(worker, f"request-{self._numbers}", request, outcome)
        self._clock.after(self._message_s, self._receive, attempt)
        return attempt

    def died(self, worker: SimWorker) -> None:
        """Report a worker's death to the routers of its requests, one message later."""
        for attempt in [a for a in self._attempts.values() if a.worker is worker]:
            self._fail(attempt, Unavailable("its worker died"))

    # ------------------------------------------------------------------ what engines say

    def receive(self, worker: SimWorker, message: FromEngine) -> None:
        match message:
            case StepTokens():
                for token in message.each():
                    self._token(token)
            case CacheChanged() | LoadReport():
                self._on_report(worker, message)
            case Rejected(request_id, reason, permanent):
                self._fail(self._attempts[request_id], Overloaded(reason, permanent=permanent))
            case _:
                raise AssertionError(f"unexpected {message!r}")

    def hear_run(self, worker: SimWorker, chains: Sequence[Chain], times: Sequence[float]) -> None:
        """Process tokens of a run, none the first or last of its request."""
        to_client_s = 2 * self._message_s
        for before, after in pairwise(times):
            self.gaps.add((after + to_client_s) - (before + to_client_s), len(chains))
        num_streams: dict[float, int] = {}
        """Streams by the time of their token before the run."""
        for chain in chains:
            attempt = self._attempts[chain.request_id]
            outcome = attempt.outcome
            num_streams[outcome.last_token_at] = num_streams.get(outcome.last_token_at, 0) + 1
            attempt.num_unsent += len(times)
            outcome.num_emitted += len(times)
            outcome.last_token_at = times[-1] + to_client_s
        for before, count in num_streams.items():
            self.gaps.add(times[0] + to_client_s - before, count)

    def _token(self, token: Token) -> None:
        """Process a token at the time its engine emits it; the client gets it two messages later."""
        attempt = self._attempts[token.request_id]
        outcome, at = attempt.outcome, self._clock.now + 2 * self._message_s
        if outcome.num_emitted:
            self.gaps.add(at - outcome.last_token_at)
        else:
            outcome.first_token_at = at
        attempt.num_unsent += 1
        outcome.num_emitted += 1
        outcome.last_token_at = at
        if token.finish is not None:
            attempt.account = token.account or attempt.account
            self._end(attempt)
            self._clock.after(self._message_s, self._arrive, attempt, True)
        elif token.account is not None:
            attempt.account = token.account
            self._clock.after(self._message_s, self._arrive, attempt)

    # ------------------------------------------------------------------ between fronts and routers

    def _receive(self, attempt: Attempt) -> None:
        if not attempt.worker.alive:
            self._fail(attempt, Unavailable("its worker died"))
        elif attempt.worker.requests.draining:
            self._fail(attempt, Draining("its worker was told to stop"))
        else:
            attempt.received_at = self._clock.now
            self._attempts[attempt.engine_id] = attempt
            attempt.call = attempt.worker.requests.hold(lambda: self._hand_over(attempt))
            attempt.worker.send(engine_request(attempt.engine_id, attempt.request))

    def _hand_over(self, attempt: Attempt) -> None:
        attempt.worker.send(Cancel(attempt.engine_id))
        if attempt.engine_id in self._attempts:
            self._fail(attempt, Draining("its worker was told to stop"))

    def _end(self, attempt: Attempt) -> None:
        del self._attempts[attempt.engine_id]
        attempt.worker.requests.release(attempt.call)

    def _fail(self, attempt: Attempt, failure: ServiceError) -> None:
        if attempt.engine_id in self._attempts:
            self._end(attempt)
        self._clock.after(self._message_s, self._arrive, attempt, True, failure)

    def _arrive(self, attempt: Attempt, is_over: bool = False, failure: ServiceError | None = None) -> None:
        """Deliver to the router what its worker has sent."""
        attempt.is_over, attempt.failure = is_over, failure
        if attempt.num_unsent:
            token_id = output_token(attempt.request.sampling.seed)
            message = pb.GenerateResponse(token_ids=[token_id] * attempt.num_unsent)
            attempt.num_unsent = 0
            if is_over and failure is None:
                self._add_finish(message, attempt)
            attempt.messages.append(message.SerializeToString())
        attempt.waker.wake()

    def _add_finish(self, message: pb.GenerateResponse, attempt: Attempt) -> None:
        request, outcome, worker = attempt.request, attempt.outcome, attempt.worker
        finished_at, block_tokens = self._clock.now - self._message_s, worker.spec.layout.block_tokens
        receipt = build_receipt(
            request, attempt.account, block_tokens, attempt.received_at, finished_at, worker.worker_id
        )
        usage = pb.Usage(prompt_tokens=outcome.request.input_tokens, completion_tokens=outcome.num_emitted)
        message.finish.CopyFrom(pb.Finish(reason=pb.FINISH_REASON_STOP, receipt=receipt, usage=usage))
