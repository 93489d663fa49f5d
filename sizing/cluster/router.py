"""A router in virtual time: the real fleet, admission and placement, without sockets and futures.

Does what `router/request_path/request_handler.py`, `router/admission/dispatcher.py` and
`router/membership/membership_service.py` do around them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.errors import InvalidRequest, Overloaded
from engine.core_types import SamplingParams
from engine.messages.from_engine import Rejected, Token
from engine.messages.to_engine import Generate
from kvcache.block_keys import BlockKey, block_keys, root_key
from loans.network import Lender, PlacementMark
from protos import decode_pb2, inference_pb2
from protos import membership_pb2 as pb
from router.admission.admission import Admission, Outcome, Started
from router.admission.config import AdmissionConfig
from router.admission.limits.tenant_limits import RateLimiter
from router.admission.request import QueuedRequest, RequestInfo
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import ActivePlacement, WorkerRecord
from router.placement.place import Decision
from router.placement.rates import session_of
from router.placement.request_demand import demand_of
from sizing.cluster.clock import ScheduledEvent, VirtualClock
from sizing.cluster.front_processes import Attempt, FrontProcesses
from sizing.cluster.runner import output_token
from sizing.cluster.worker import SimWorker
from worker.requests.receipt import build_receipt
from workloads.request import EndState, TraceRequest
from workloads.request import Outcome as Result
from workloads.results import LatencyHistogram

MAX_ATTEMPTS = 4
DEADLINE_S = 600.0
SETTLE_S = 0.2
"""Seconds after a worker's death until its membership has ended, as `RequestHandler` waits."""


@dataclass(slots=True, eq=False)
class SimRequest:
    """One request at its router."""

    result: Result
    prompt: tuple[int, ...]
    info: RequestInfo
    demand: Demand
    keys: Sequence[BlockKey]
    on_end: Callable[[Result], object]
    attempts: int = 1
    failures: int = 0
    placed: ActivePlacement | None = None
    decision: Decision | None = None
    placed_at: float = 0.0
    started_at: float = 0.0

    @property
    def emitted(self) -> tuple[int, ...]:
        """Tokens emitted by all attempts so far."""
        return (output_token(self.result.request.number),) * self.result.num_emitted


class SimRouter:
    """One router of a cluster."""

    def __init__(
        self,
        fleet: Fleet,
        config: AdmissionConfig,
        clock: VirtualClock,
        fronts: FrontProcesses,
        message_s: float,
        gaps: LatencyHistogram,
    ) -> None:
        """Create the router.

        `message_s` is the delay to a worker and to a client; `gaps` counts inter-token latencies.
        """
        self._gaps = gaps
        self.fleet = fleet
        self._tenants = RateLimiter(config)
        self.admission = Admission(fleet, config, self._tenants)
        self._clock = clock
        self._fronts = fronts
        self._message_s = message_s
        self._members: dict[SimWorker, WorkerRecord] = {}
        self._workers: dict[str, SimWorker] = {}
        self._decoders: dict[SimWorker, pb.Hello] = {}
        self._waiting: dict[QueuedRequest, SimRequest] = {}
        self._timer: ScheduledEvent | None = None

    # ------------------------------------------------------------------ membership

    def joined(self, worker: SimWorker, hello: pb.Hello) -> None:
        self._workers[worker.worker_id] = worker
        self._members[worker] = self.fleet.joined(hello)
        if worker.role == "decode":
            self._decoders[worker] = hello
        self._kick()

    def drains(self, worker: SimWorker) -> None:
        """Process that a worker is draining."""
        if (member := self._members.get(worker)) is not None:
            self.fleet.drains(member)
            self._kick()

    def reported(self, worker: SimWorker, message: pb.LoadReport | pb.CacheEvents) -> None:
        """Process a report of a worker that may have left."""
        if (member := self._members.get(worker)) is None:
            return
        if isinstance(message, pb.LoadReport):
            self.fleet.reported(member, message)
        elif message.snapshot or member.next_cache_sequence is not None:  # nothing to change before the first snapshot
            in_step = self.fleet.cache_changed(member, message)
            assert in_step, "nothing is lost between a simulated worker and its router"
        self._kick()

    def left(self, worker: SimWorker) -> None:
        if (member := self._members.pop(worker, None)) is None:
            return
        self.fleet.left(member)
        del self._workers[worker.worker_id]
        self._decoders.pop(worker, None)
        self._kick()

    # ------------------------------------------------------------------ requests

    def submit(self, result: Result, on_end: Callable[[Result], object]) -> None:
        """Submit a request.

        `on_end` is called once, when its client has the last message.
        """
        request, now = result.request, self._clock.now
        self.fleet.traffic.arrived(request.input_tokens)
        if not self._decoders:
            result.reason = "no decode worker is running"
            self._finish(result, EndState.FAILED, on_end)
            return
        context = next(iter(self._decoders.values())).max_context_tokens
        if request.input_tokens + request.output_tokens > context:
            result.reason = f"longer than the model's context of {context} tokens"
            self._finish(result, EndState.REFUSED, on_end)
            return
        prompt = tuple(request.tokens())
        try:
            demand, keys = self._needs(prompt, prompt, request)
        except InvalidRequest:
            result.reason = "larger than every pool"
            self._finish(result, EndState.REFUSED, on_end)
            return
        info = RequestInfo(request.tenant, request.priority, now, now + DEADLINE_S)
        self._tenants.enter(request.tenant, 0, now)
        self._queue(SimRequest(result, prompt, info, demand, keys, on_end))

    def _queue(self, prepared: SimRequest) -> None:
        waiting, outcomes = self.admission.arrived(prepared.info, prepared.demand, prepared.keys, self._clock.now)
        self._waiting[waiting] = prepared
        self._perform(outcomes)

    def _perform(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            prepared = self._waiting.pop(outcome.waiting)
            if isinstance(outcome, Started):
                self._start(prepared, outcome.placed, outcome.decision)
            else:
                prepared.result.reason = str(outcome.refusal.reason)
                self._end(prepared, EndState.REFUSED)
        self._arm()

    def _start(self, prepared: SimRequest, placed: ActivePlacement, decision: Decision) -> None:
        prepared.placed, prepared.decision, prepared.placed_at = placed, decision, self._clock.now
        prepared.result.num_attempts += 1
        prepared.result.predicted_ttft_s = decision.predicted_ttft_s
        request = prepared.result.request
        engine_id = self._fronts.new_id("request")
        generate = Generate(
            request_id=engine_id,
            prompt=prepared.prompt,
            emitted=prepared.emitted,
            sampling=SamplingParams(max_tokens=request.output_tokens, seed=request.number, ignore_eos=True),
            cache_salt="",
            priority=request.priority,
            lender=self._lender(placed, decision),
            reads_store=decision.lender_id is not None and placed.lender is None,
            mark=PlacementMark(self.fleet.mark, placed.sequence),
            reserve_output_tokens=placed.demand.expected_output_tokens,
        )
        worker = self._workers[decision.decode_id]
        self._fronts.generate(
            Attempt(
                worker,
                engine_id,
                generate,
                on_token=lambda attempt, token: self._token(prepared, attempt, token),
                on_run=lambda _, times: self._run(prepared, times),
                on_rejected=lambda _, rejected: self._clock.after(self._message_s, self._rejected, prepared, rejected),
                on_lost=lambda _: self._lost(prepared),
                on_handed_over=lambda _: self._handed_over(prepared),
            )
        )

    def _lender(self, placed: ActivePlacement, decision: Decision) -> Lender | None:
        if placed.lender is None:
            return None
        source = self._workers[placed.source.worker_id].peer if placed.source else None
        reads_store = decision.source_id is not None and source is None
        return Lender(self._workers[placed.lender.worker_id].peer, decision.lender_computes, source, reads_store)

    # ------------------------------------------------------------------ what comes of an attempt

    def _token(self, prepared: SimRequest, attempt: Attempt, token: Token) -> None:
        """Process a token at the time its engine emits it; the client gets it two messages later."""
        result, at = prepared.result, self._clock.now + 2 * self._message_s
        if result.num_emitted:
            self._gaps.add(at - result.last_token_at)
        else:
            result.first_token_at = at
        result.num_emitted += 1
        result.last_token_at = at
        if token.account is not None and token.finish is None:
            self._clock.after(self._message_s, self._started, prepared)
        if token.finish is not None:
            self._clock.after(self._message_s, self._finished, prepared, attempt)

    def _run(self, prepared: SimRequest, times: Sequence[float]) -> None:
        """Process tokens of a run, none the first or last.

        Gaps within the run are counted for all its streams.
        """
        result = prepared.result
        self._gaps.add(times[0] + 2 * self._message_s - result.last_token_at)
        result.num_emitted += len(times)
        result.last_token_at = times[-1] + 2 * self._message_s

    def _started(self, prepared: SimRequest) -> None:
        assert prepared.placed is not None
        if not prepared.placed.started:
            self.fleet.started(prepared.placed)
            prepared.started_at = self._clock.now
            if not prepared.info.streaming:
                self.fleet.traffic.first_token(prepared.started_at - prepared.info.arrived_at)

    def _finished(self, prepared: SimRequest, attempt: Attempt) -> None:
        placed, result = prepared.placed, prepared.result
        assert placed is not None
        self._started(prepared)
        finish = self._receipt(prepared, attempt)
        self.fleet.finished(placed, finish, prepared.started_at - prepared.placed_at)
        self.fleet.traffic.finished(finish)
        result.receipt = finish.receipt
        kv = finish.receipt.kv
        result.moved_bytes += kv.moved_bytes
        from_cache = kv.reused_blocks + kv.store_blocks + kv.lender_cached_blocks + kv.lender_fetched_blocks
        result.reused_tokens = from_cache * kv.block_tokens
        self._over(prepared)
        self._end(prepared, EndState.FINISHED)

    def _rejected(self, prepared: SimRequest, rejected: Rejected) -> None:
        assert prepared.placed is not None
        if rejected.permanent:
            self._over(prepared)
            prepared.result.reason = rejected.reason
            self._end(prepared, EndState.FAILED)
            return
        try:
            self.admission.refused_by_worker(prepared.placed, self._clock.now)
        except Overloaded as error:
            self._over(prepared)
            prepared.result.reason = str(error)
            self._end(prepared, EndState.REFUSED)
            return
        self._over(prepared)
        self._queue(prepared)

    def _lost(self, prepared: SimRequest) -> None:
        """Place a request again after its worker died, with the emitted tokens."""
        prepared.failures += 1
        self._over(prepared)
        if prepared.failures == MAX_ATTEMPTS:
            prepared.result.reason = f"{prepared.failures} workers died"
            self._end(prepared, EndState.FAILED)
            return
        prepared.attempts += 1
        self._clock.after(SETTLE_S / 10, self._again, prepared)

    def _handed_over(self, prepared: SimRequest) -> None:
        """Place a request again that its worker handed over, which is no failure."""
        assert prepared.placed is not None
        if self.fleet.worker(prepared.placed.decode.worker_id) is prepared.placed.decode:
            self.fleet.drains(prepared.placed.decode)
        self._over(prepared)
        prepared.attempts += 1
        self._again(prepared)

    def _again(self, prepared: SimRequest) -> None:
        if not self._decoders:
            prepared.result.reason = "no decode worker is left"
            self._end(prepared, EndState.FAILED)
            return
        chain = [*prepared.prompt, *prepared.emitted]
        prepared.info.streaming = bool(prepared.emitted)
        try:
            prepared.demand, prepared.keys = self._needs(prepared.prompt, chain, prepared.result.request)
        except InvalidRequest:
            prepared.result.reason = "larger than every pool that is left"
            self._end(prepared, EndState.FAILED)
            return
        self._queue(prepared)

    def _needs(
        self, prompt: Sequence[int], chain: Sequence[int], request: TraceRequest
    ) -> tuple[Demand, list[BlockKey]]:
        """Return the demand, as `RequestHandler` does for one choice.

        Raises InvalidRequest when no pool could hold it.
        """
        hello = next(iter(self._decoders.values()))
        largest = max(other.num_blocks for other in self._decoders.values())
        sampling = inference_pb2.Sampling(max_tokens=request.output_tokens)
        demand = demand_of(prompt, sampling, [chain], False, hello.block_tokens, hello.block_bytes, largest)
        session = session_of(request.tenant, request.session_id, "")
        demand = self.fleet.with_expected_output(demand, (request.tenant, ""), len(prompt), session)
        usable = chain[: demand.num_usable_blocks * demand.block_tokens]
        return demand, block_keys(root_key(hello.model_fingerprint, ""), usable, demand.block_tokens)

    def _over(self, prepared: SimRequest) -> None:
        """End the attempt: fleet and admission count it no more."""
        placed, prepared.placed = prepared.placed, None
        assert placed is not None
        self._perform(self.admission.ended(placed, self._clock.now))

    def _end(self, prepared: SimRequest, end_state: EndState) -> None:
        self._tenants.leave(prepared.info.tenant, 0, self._clock.now)
        self._finish(prepared.result, end_state, prepared.on_end)

    def _finish(self, result: Result, end_state: EndState, on_end: Callable[[Result], object]) -> None:
        result.end_state = end_state
        on_end(result)

    def _receipt(self, prepared: SimRequest, attempt: Attempt) -> inference_pb2.Finish:
        decision = prepared.decision
        assert decision is not None
        placement = inference_pb2.Placement(
            decode_worker=decision.decode_id, lender=decision.lender_id or "", attempt=prepared.attempts
        )
        elapsed_ms = (prepared.placed_at - prepared.info.arrived_at) * 1e3
        request = decode_pb2.DecodeRequest(placement=placement, elapsed_ms=elapsed_ms)
        layout = attempt.worker.spec.layout
        receipt = build_receipt(
            request,
            attempt.account,
            layout.block_tokens,
            attempt.received_at,
            self._clock.now - self._message_s,
            attempt.worker.worker_id,
        )
        usage = inference_pb2.Usage(
            prompt_tokens=prepared.result.request.input_tokens, completion_tokens=prepared.result.num_emitted
        )
        return inference_pb2.Finish(receipt=receipt, usage=usage)

    # ------------------------------------------------------------------ time

    def _kick(self) -> None:
        self._perform(self.admission.changed(self._clock.now))

    def _arm(self) -> None:
        """Schedule the next look of admission."""
        at = self.admission.next_time()
        if self._timer is not None:
            if self._timer.at == at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer = self._clock.at(max(at, self._clock.now), self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._kick()
