"""A router in virtual time: the real one, with links to simulated workers, and traces in place of clients."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from cluster.errors import InvalidRequest, ServiceError
from engine.model.model_dir import ModelDir
from protos import inference_pb2
from protos import membership_pb2 as pb
from router.admission.arrivals import Arrivals
from router.admission.config import AdmissionConfig
from router.admission.dispatcher import Dispatcher
from router.admission.limits.tenant_limits import Shares, TenantLimits
from router.admission.request import RequestInfo
from router.config import RouterConfig
from router.membership.members import Members
from router.models.config import ModelEntry
from router.models.model_files import ModelFiles
from router.models.model_runtime import ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.models.output.output_plan import OutputPlan
from router.models.prompts.prompts import PromptEncoder
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import ActivePlacement, WorkerRecord
from router.placement.place import Decision
from router.prepared_request import PreparedRequest
from router.request_path.observation import Unobserved
from router.request_path.preprocess import Preprocessor
from router.request_path.request_handler import RequestHandler
from router.security.api_keys import ANYBODY
from sizing.cluster.clock import VirtualClock
from sizing.cluster.front_processes import FrontProcesses, SimLink
from sizing.cluster.worker import SimWorker
from workloads.request import EndState, Outcome

MODEL = "simulated"
DEADLINE_S = 600.0


class SimRouter:
    """One router of a cluster."""

    def __init__(
        self, fleet: Fleet, admission: AdmissionConfig, clock: VirtualClock, fronts: FrontProcesses, context: int
    ) -> None:
        """Create the router of a model whose context has so many tokens."""
        self.fleet = fleet
        self._clock = clock
        self._fronts = fronts
        self._numbers = count(1)
        self._outcomes: dict[str, Outcome] = {}
        """Outcomes of requests under way, by request id."""
        self._joined: dict[SimWorker, WorkerRecord] = {}
        config = RouterConfig.model_construct()
        limits = TenantLimits(admission, clock=clock.time)
        dispatcher = Dispatcher(fleet, admission, limits.tenants, clock.time)
        self.admission = dispatcher.admission
        waits = Shares(admission.max_queued, admission.max_queued_per_tenant)
        self._model = ModelRuntime(_files(config, context), fleet, dispatcher, waits)
        models = ModelRuntimes([self._model], MODEL)
        self._members = Members(models, clock.time)
        reader = _TraceReader(config, self._model, models, clock, self._outcomes)
        arrivals = Arrivals(admission, limits, is_paced=False)  # reading takes no virtual time
        self._handler = RequestHandler(config, reader, limits, arrivals, self._watch, clock.time)

    # ------------------------------------------------------------------ workers

    def joined(self, worker: SimWorker, hello: pb.Hello) -> None:
        _, member = self._members.admit(hello)
        self._joined[worker] = member
        self._model.links.add(member, SimLink(self._fronts, worker, self._outcomes))

    def reported(self, worker: SimWorker, message: pb.WorkerMessage) -> None:
        """Process a report of a worker that may have left."""
        if (member := self._joined.get(worker)) is None:
            return
        if member.next_cache_sequence is None and message.HasField("cache") and not message.cache.snapshot:
            return  # nothing to change before the first snapshot
        for _ in self._members.absorb(self._model, member, message):
            pass
        assert member.next_cache_sequence is not None, "nothing is lost between a simulated worker and its router"

    def left(self, worker: SimWorker) -> None:
        if (member := self._joined.pop(worker, None)) is not None:
            self._members.left(self._model, member)

    # ------------------------------------------------------------------ requests

    def submit(self, outcome: Outcome, on_end: Callable[[Outcome], object]) -> None:
        """Submit a request.

        `on_end` is called once, when its client has the last message.
        """
        self._clock.spawn(self._serve(outcome, on_end))

    async def _serve(self, outcome: Outcome, on_end: Callable[[Outcome], object]) -> None:
        asked, name = outcome.request, f"{next(self._numbers)}"
        self._outcomes[name] = outcome
        request = inference_pb2.GenerateRequest(
            request_id=name, tenant=asked.tenant, priority=asked.priority, session_id=asked.session_id
        )
        try:
            async for _ in self._handler.generate(request, DEADLINE_S, ANYBODY):
                pass
            outcome.end_state = EndState.FINISHED
        except ServiceError as error:
            is_refused = bool(error.refused_for) or isinstance(error, InvalidRequest)
            outcome.end_state = EndState.REFUSED if is_refused else EndState.FAILED
            outcome.reason = "larger than every pool" if error.field else error.refused_for or error.message
        del self._outcomes[name]
        on_end(outcome)

    def _watch(self, request: inference_pb2.GenerateRequest, principal: object, is_warm: bool) -> Unobserved:
        return _Watched(self._outcomes[request.request_id])


class _TraceReader(Preprocessor):
    """Preprocessor of requests of a trace, whose prompts are tokens already."""

    def __init__(
        self,
        config: RouterConfig,
        model: ModelRuntime,
        models: ModelRuntimes,
        clock: VirtualClock,
        outcomes: dict[str, Outcome],
    ) -> None:
        super().__init__(config, models, clock.time)
        self._model, self._outcomes = model, outcomes
        self._output = OutputPlan(model.encoder.output_format)

    async def check(self, request: inference_pb2.GenerateRequest, *arguments: Any, **options: Any) -> PreparedRequest:
        """Return the request of the trace.

        Raises InvalidRequest.
        """
        asked, now, context = self._outcomes[request.request_id].request, self._clock(), self._model.model_dir
        if asked.input_tokens + asked.output_tokens > context.max_context_tokens:
            raise InvalidRequest("", f"longer than the model's context of {context.max_context_tokens} tokens")
        sampling = inference_pb2.Sampling(
            max_tokens=asked.output_tokens, n=1, temperature=1.0, top_p=1.0, seed=asked.number, ignore_eos=True
        )
        return PreparedRequest(
            request=request,
            request_id=request.request_id,
            model=self._model.for_request(request.request_id),
            model_reason="",
            verdicts=(),
            prompt=asked.tokens(),
            sampling=sampling,
            output=self._output,
            cache_salt="",
            arrived_at=now,
            tokenised_at=now,
            deadline=now + DEADLINE_S,
            info=RequestInfo(asked.tenant, asked.priority, now, now + DEADLINE_S),
        )


class _Watched(Unobserved):
    """Observation of a request for its outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def placed(self, attempt: int, placed_after_s: float, decision: Decision, placed: ActivePlacement) -> None:
        self._outcome.num_attempts += 1
        self._outcome.predicted_ttft_s = decision.predicted_ttft_s

    def attempt_finished(self, finish: inference_pb2.Finish) -> None:
        outcome, kv = self._outcome, finish.receipt.kv
        outcome.receipt = finish.receipt
        outcome.moved_bytes = kv.moved_bytes
        from_cache = kv.reused_blocks + kv.store_blocks + kv.lender_cached_blocks + kv.lender_fetched_blocks
        outcome.reused_tokens = from_cache * kv.block_tokens


def _files(config: RouterConfig, context: int) -> ModelFiles:
    """Return the files of a model of which nothing but the context matters."""
    model_dir = ModelDir(Path(MODEL), {"vocab_size": 1 << 32, "max_position_embeddings": context})
    entry, encoder = ModelEntry.model_construct(name=MODEL), PromptEncoder(model_dir)
    return ModelFiles(entry, config, model_dir, encoder, MODEL.encode(), None, "", generates=True, clamps=False)
