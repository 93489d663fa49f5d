"""Picker: from a request that a gateway holds to the server that serves it, by the router's own admission and `place`.

A request that the router cannot read is no error: its server may read it. It goes to the ready server with the least
load, as a request of one token does.

Answers that a gateway shows, as the end of a stream from which placement learns.

Pure. A server's answer has no receipt, so what placement predicted stands where the server tells nothing.

The lender in a request's body. Pure.
"""

import asyncio
import json
import re
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from cluster import logs
from cluster.errors import InvalidRequest, RevisionGone, ServiceError, Unavailable, UnknownModel
from cluster.logs import from_headers, traceparent
from kvcache.block_keys import BlockKey
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrival, Arrivals
from router.admission.limits.tenant_limits import TenantLimits
from router.admission.request import RequestInfo
from router.config import RouterConfig
from router.frontend.anthropic.answer import error_form as messages_error_form
from router.frontend.anthropic.messages import read_messages
from router.frontend.envoy.exchange import PickWanted, ResponseBegan
from router.frontend.http.body.fields import parse_object
from router.frontend.http.endpoint import INLINE_BYTES, SPARE_VALUES
from router.frontend.http.errors import Caller, ErrorAnswer, caller_of, error_answer, openai_form
from router.frontend.openai.chat import read_chat
from router.frontend.openai.completions import read_completion
from router.frontend.openai.responses.responses import read_response
from router.frontend.openai.responses.responses_answer import error_form as responses_error_form
from router.models.model_runtime import ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.placement.demand import Demand
from router.placement.fleet.worker_records import ActivePlacement, WorkerRecord
from router.placement.place import Decision
from router.prepared_request import PreparedRequest
from router.request_path.observation import Observation, Observer
from router.request_path.preprocess import Preprocessor
from router.request_path.stream_state import StreamState
from router.security.api_keys import ApiKeys
from router.stock.link import GatewayRequest, StockLink

TAIL_BYTES = 4096
"""Bytes of an answer's end, which has its usage and how it ended."""
_COMPLETION = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)')
_CUT = re.compile(rb'"(?:finish|stop)_reason"\s*:\s*"(?:length|max_tokens)"')


@dataclass(slots=True)
class SeenAnswer:
    """Parts of an answer that matter for placement."""

    streams: bool = False
    """Whether it is a stream of events, so that its first bytes are the first token."""
    num_events: int = 0
    tail: bytes = b""

    def add(self, body: bytes) -> None:
        self.num_events += body.count(b"data:")
        self.tail = (self.tail + body)[-TAIL_BYTES:]

    @property
    def num_tokens(self) -> int:
        """Output tokens by the server's usage, or about as many as it sent events; 0: unknown."""
        if told := _COMPLETION.findall(self.tail):
            return int(told[-1])
        return max(1, self.num_events - 1) if self.streams else 0


def finish_of(
    request_id: str, placed: ActivePlacement, decision: Decision, answer: SeenAnswer, first_s: float, rest_s: float
) -> pb.Finish:
    """Return the end of a stream whose first bytes came `first_s` after its placement, and its last `rest_s` later."""
    demand, decode_id = placed.demand, decision.decode_id
    hits = min(demand.num_usable_blocks, decision.hit_blocks)
    if placed.lender is None and (cached := _CACHED.findall(answer.tail)):
        hits = min(demand.num_usable_blocks, int(cached[-1]) // demand.block_tokens)
    kv = pb.KvReceipt(block_tokens=demand.block_tokens, predicted=not _CACHED.search(answer.tail))
    stages = []
    if placed.lender is None:
        kv.reused_blocks, kv.computed_blocks = hits, demand.num_usable_blocks - hits
        kv.computed_tokens = demand.num_tokens - hits * demand.block_tokens
        stages.append(pb.Stage(name="prompt tail", where=decode_id, duration_ms=first_s * 1e3))
    stages.append(pb.Stage(name="decode", where=decode_id, start_ms=first_s * 1e3, duration_ms=rest_s * 1e3))
    placement = pb.Placement(
        decode_worker=decode_id,
        lender=decision.lender_id or "",
        reason=decision.reason,
        candidates=decision.num_candidates,
        predicted_ttft_ms=decision.predicted_ttft_s * 1e3,
        predicted_hit_blocks=decision.hit_blocks,
        attempt=1,
    )
    return pb.Finish(
        reason=pb.FINISH_REASON_LENGTH if _CUT.search(answer.tail) else pb.FINISH_REASON_STOP,
        usage=pb.Usage(
            prompt_tokens=demand.num_tokens,
            completion_tokens=answer.num_tokens,
            cached_tokens=hits * demand.block_tokens,
        ),
        receipt=pb.Receipt(request_id=request_id, placement=placement, kv=kv, stages=stages if answer.streams else []),
    )


FIELD = "kv_transfer_params"


def with_lender(body: bytes, values: Mapping[str, Any], lender: str) -> bytes | None:
    """Return a JSON object, whose parsed fields are `values`, with the server from which vLLM borrows blocks.

    All else stays as it is, byte by byte. None where the client set the field itself: it steers its own transfers.
    """
    if values.get(FIELD) is not None:
        return None
    end = body.rindex(b"}")
    # At the end, since of a field that comes twice JSON's readers take the last: the client's may be null.
    field = f"{',' if values else ''}{json.dumps(FIELD)}:{json.dumps({'lender': lender})}"
    return body[:end] + field.encode() + body[end:]


APIS: Mapping[str, tuple[Any, Any]] = {
    "/v1/completions": (read_completion, openai_form),
    "/v1/chat/completions": (read_chat, openai_form),
    "/v1/responses": (read_response, responses_error_form),
    "/v1/messages": (read_messages, messages_error_form),
}
"""Readers of bodies and forms of errors, by path."""
FAIRNESS = "x-gateway-inference-fairness-id"
"""Header of InferencePool's gateways for what is a tenant here."""
ONE_TOKEN = [0]
NAMES = {"tenant": "x-tenant", "request_id": "x-request-id"}


@dataclass(slots=True)
class Pick:
    """A placed request, until its exchange is over."""

    placed: ActivePlacement
    endpoints: str
    """Endpoints as host:port, the picked one first, with commas."""
    body: bytes | None
    """Body in place of the client's; None: the client's own."""
    _model: ModelRuntime
    _followed: GatewayRequest
    _observed: "_Observed | None"
    """Observation of a request that was read."""
    _placed_at: float = field(default_factory=time.monotonic)
    _first_at: float = 0.0
    _answer: SeenAnswer = field(default_factory=SeenAnswer)
    _is_well: bool = False

    def answered(self, began: ResponseBegan) -> None:
        """Process the headers of the answer, from the server or from the gateway in its place."""
        self._is_well, self._answer.streams = began.status == 200, began.streams
        if began.status >= 500 or began.served not in ("", self.endpoints.partition(",")[0]):
            self.placed.failed = True
            self._followed.failed()
            if self._observed is not None:
                reason = f"status {began.status} from {began.served or self.endpoints}"
                self._observed.observation.attempt_failed(Unavailable(reason))

    def heard(self, body: bytes) -> None:
        """Process bytes of the answer."""
        if self.placed.failed:
            return
        self._answer.add(body)
        self._followed.heard()
        if not self.placed.started:
            self._first_at = time.monotonic()
            self._model.fleet.started(self.placed)
        if self._observed is not None:
            self._observed.heard(self._first_at, self._placed_at)

    def ended(self) -> None:
        """Learn from an answer that came to its end."""
        if self._observed is None or not self._is_well or not self._first_at:
            return
        prepared, decision, fleet = self._observed.prepared, self._observed.decision, self._model.fleet
        assert decision is not None, "it was placed"
        first_s, rest_s = self._first_at - self._placed_at, time.monotonic() - self._first_at
        finish = finish_of(prepared.request_id, self.placed, decision, self._answer, first_s, rest_s)
        prepared.finish, prepared.num_output_tokens = finish, finish.usage.completion_tokens
        self._observed.observation.attempt_finished(finish)
        fleet.traffic.finished(finish)
        fleet.finished(self.placed, finish, first_s if self._answer.streams else None)


@dataclass(slots=True)
class _Observed:
    """A request that was read, and its observation."""

    prepared: PreparedRequest
    observation: Observation
    decision: Decision | None = None
    """Decision by which it was placed."""
    _is_heard: bool = False

    def heard(self, first_at: float, placed_at: float) -> None:
        if not self._is_heard:
            self._is_heard = True
            self.observation.started(first_at - placed_at)
            self.prepared.model.fleet.traffic.first_token(first_at - self.prepared.arrived_at)
        self.observation.message(b"")

    def num_tokens(self) -> int:
        """Return the tokens that count against quotas: those told, or as many as there might be."""
        told = self.prepared.num_output_tokens
        return len(self.prepared.prompt) + told if told else self.prepared.most_tokens


class Picker:
    """Picker of one router."""

    def __init__(
        self,
        config: RouterConfig,
        models: ModelRuntimes,
        tenant_limits: TenantLimits,
        arrivals: Arrivals,
        observer: Observer,
        keys: ApiKeys,
    ) -> None:
        self._config = config
        self._models = models
        self._tenant_limits = tenant_limits
        self._arrivals = arrivals
        self._observer = observer
        self._keys = keys
        self._preprocessor = Preprocessor(config, models)
        self._max_values = max(model.model_dir.max_context_tokens for model in models) + SPARE_VALUES

    def refusal(self, wanted: PickWanted, error: ServiceError) -> ErrorAnswer:
        """Return the answer to the client for an error of `pick`, in the form of the request's API."""
        _, form = APIS.get(_path_of(wanted), (None, openai_form))
        return error_answer(error, NAMES, form)

    async def pick(self, wanted: PickWanted, held: ExitStack) -> Pick:
        """Wait for a placement; closing `held` ends it. Raises ServiceError for a request that is refused."""
        traceparent.set(from_headers(wanted.headers))
        named = {"x-tenant": wanted.headers.get(FAIRNESS, ""), **wanted.headers}
        caller = caller_of(named, self._keys)
        logs.request_id.set(caller.request_id)
        with ExitStack() as mine:
            arrival = mine.enter_context(self._arrivals.arriving(caller.tenant))
            found = await self._read(wanted, caller, arrival)
            try:
                pick = None if found is None else await self._by_prompt(*found, wanted, caller, arrival, mine)
            except (InvalidRequest, UnknownModel, RevisionGone):
                pick = None
            if pick is None:
                pick = await self._by_load(wanted, caller, arrival, mine)
            held.push(mine.pop_all())
            return pick

    async def _read(
        self, wanted: PickWanted, caller: Caller, arrival: Arrival
    ) -> tuple[pb.GenerateRequest, dict[str, Any], float | None] | None:
        """Return the request, the fields of its body and its time limit; None where it cannot be read."""
        reader, _ = APIS.get(_path_of(wanted), (None, None))
        if reader is None or not wanted.body:
            return None
        arrival.hold(len(wanted.body))

        def parse(body: bytes) -> tuple[Any, dict[str, Any]]:
            values = parse_object(body, self._max_values)
            return reader(values, caller), values

        try:
            if len(wanted.body) <= INLINE_BYTES:
                api_request, values = parse(wanted.body)
            else:
                api_request, values = await asyncio.to_thread(parse, wanted.body)
        except InvalidRequest:
            return None
        # Several prompts run on one server; the first stands for them.
        request: pb.GenerateRequest = api_request.requests[0]
        request.sampling.ClearField("structured")  # the server compiles its grammar
        return request, values, api_request.deadline_s

    async def _by_prompt(
        self,
        request: pb.GenerateRequest,
        values: dict[str, Any],
        deadline_s: float | None,
        wanted: PickWanted,
        caller: Caller,
        arrival: Arrival,
        held: ExitStack,
    ) -> Pick:
        """Place a request by its prompt. Raises ServiceError."""
        assert wanted.body is not None, "it was read"
        with ExitStack() as mine:
            with self._arrivals.reading(arrival):
                prepared = await self._preprocessor.check(request, deadline_s, caller.principal, arrival)
            mine.callback(prepared.close)
            observation = mine.enter_context(self._observer.watch(request, caller.principal, is_warm=False))
            observation.checked(prepared)
            prepared.model.fleet.traffic.arrived(len(prepared.prompt))
            observed = _Observed(prepared, observation)
            charge = await self._tenant_limits.enter(request.tenant, prepared.most_tokens, prepared.sampling.n)
            mine.callback(self._tenant_limits.leave, charge, observed.num_tokens)
            arrival.queued()
            demand, keys = await self._preprocessor.needs(prepared, StreamState(prepared.sampling.n))
            pick = await self._placed(prepared.model, prepared.info, demand, keys, wanted, mine, observed)
            if (lender := pick.placed.lender) is not None:
                pick.body = with_lender(wanted.body, values, lender.hello.address)
            held.push(mine.pop_all())
            return pick

    async def _by_load(self, wanted: PickWanted, caller: Caller, arrival: Arrival, held: ExitStack) -> Pick:
        """Place a request whose prompt is unknown. Raises ServiceError."""
        arrival.queued()
        model = next((each for each in self._models if each.decode_workers()), next(iter(self._models)))
        now = time.monotonic()
        await model.await_workers(caller.tenant, now + self._config.no_worker_grace_s)
        demand, _ = model.needs(ONE_TOKEN, pb.Sampling(max_tokens=1, n=1), "", [ONE_TOKEN], to_score=False)
        info = RequestInfo(caller.tenant, 0, now, now + self._config.default_deadline_s)
        return await self._placed(model, info, demand, [], wanted, held)

    async def _placed(
        self,
        model: ModelRuntime,
        info: RequestInfo,
        demand: Demand,
        keys: list[BlockKey],
        wanted: PickWanted,
        held: ExitStack,
        observed: _Observed | None = None,
    ) -> Pick:
        if wanted.subset is not None:
            ready = (worker.worker_id for worker in model.starting_workers(embeds=False) if _in(wanted.subset, worker))
            if not (only := tuple(ready)):
                raise Unavailable(f"none of the {len(wanted.subset)} endpoints that the gateway allows is ready")
            demand = replace(demand, only=only)
        while True:
            placed, decision = await model.dispatcher.place(info, demand, keys)
            try:
                link = model.links.to(placed.decode)
                if isinstance(link, StockLink) and not link.broken:
                    break
            except Unavailable:
                pass
            placed.failed = True  # the server left at this very moment
            model.dispatcher.ended(placed)
        held.callback(model.dispatcher.ended, placed)
        if observed is not None:
            observed.decision = decision
            observed.observation.placed(1, time.monotonic() - observed.prepared.arrived_at, decision, placed)
        num_blocks = demand.num_blocks_to_reserve(placed.decode.hello.reserve_output_tokens)
        followed = link.follow(placed.sequence, placed.own_tokens, num_blocks, _known_keys(placed))
        held.callback(followed.end)
        return Pick(placed, self._endpoints(model, placed, decision), None, model, followed, observed)

    def _endpoints(self, model: ModelRuntime, placed: ActivePlacement, decision: Decision) -> str:
        """Return the picked endpoint, then the next best ones, for gateways that retry; no lender is among them."""
        names = [placed.decode.worker_id]
        for rival in decision.alternatives:
            if len(names) <= self._config.epp_fallbacks and rival.decode_id not in (*names, decision.lender_id):
                names.append(rival.decode_id)
        workers = [worker for name in names if (worker := model.fleet.worker(name)) is not None]
        return ",".join(map(_endpoint_of, workers))


def _path_of(wanted: PickWanted) -> str:
    path = wanted.headers.get(":path", "").partition("?")[0]
    return path if wanted.headers.get(":method", "POST") == "POST" else ""


def _endpoint_of(worker: WorkerRecord) -> str:
    """Return host:port of a worker."""
    return urlsplit(worker.hello.address).netloc


def _in(subset: frozenset[str], worker: WorkerRecord) -> bool:
    return _endpoint_of(worker) in subset


def _known_keys(placed: ActivePlacement) -> tuple[BlockKey, ...]:
    """Return the keys of the prompt's blocks as the server names them."""
    is_same = placed.decode.hello.block_tokens == placed.demand.block_tokens and not placed.demand.other_keys
    return placed.keys if is_same else ()
