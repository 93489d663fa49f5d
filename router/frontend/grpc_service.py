"""The public Inference service over gRPC.

The message of a call to the public gRPC service: read when its tenant may have it read, and parsed.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from cluster.errors import Draining, InvalidRequest, ServiceError, Unavailable
from cluster.fair_turns import FairTurns
from cluster.logs import from_metadata, traceparent
from cluster.network.error_status import end_call
from cluster.process.life import Drain
from cluster.process.tasks import Endable
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrival, Arrivals, RefusalPace
from router.frontend.batch import generate_batch
from router.membership.status import cluster_status
from router.models.model_runtime import ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.observability.explained import candidate_of, compared, num_shown, to_response
from router.observability.record_file import RecordFile
from router.request_path.late_messages import joined
from router.request_path.parsed_stream import generate_parts
from router.request_path.preprocess import tenant_of
from router.request_path.queries import Queries
from router.request_path.request_handler import RequestHandler
from router.request_path.warming import Warming
from router.security.api_keys import ApiKeys, Principal, bearer_of

READ_S = 60.0
"""Seconds for a message to arrive."""
_Parsed = TypeVar("_Parsed", bound=Message)


class CallMessage:
    """Message of one call, not read yet where gRPC hands over an iterator of messages.

    gRPC then holds no more of it than its flow control lets pass.
    """

    def __init__(self, raw: bytes | AsyncIterator[bytes], turns: FairTurns) -> None:
        self._raw = raw
        self._turns = turns

    async def read(self, tenant: str) -> bytes:
        """Return the bytes, once; messages of one tenant that arrive slowly keep only its own waiting.

        Raises InvalidRequest for a call without a message, or with one that is too slow.
        """
        raw, self._raw = self._raw, b""
        if isinstance(raw, bytes):
            return raw
        async with self._turns.turn(tenant):
            try:
                async with asyncio.timeout(READ_S):
                    return await anext(raw)
            except TimeoutError:
                raise InvalidRequest("request", f"did not arrive within {READ_S:g} s") from None
            except StopAsyncIteration:
                raise InvalidRequest("request", "the call has no message") from None


def parsed(kind: type[_Parsed], raw: bytes) -> _Parsed:
    """Parse a message.

    Raises InvalidRequest.
    """
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest("request", f"is not a valid {kind.DESCRIPTOR.name}: {error}") from None


NAME = "tandem.v1.Inference"
READING, READING_PER_TENANT = 256, 16
"""Messages that are read at a time, of all tenants and of one."""


class InferenceService:
    """gRPC service, registered by hand: Generate passes messages through as bytes.

    Bytes that are no message get InvalidRequest, where gRPC's own answer would be UNKNOWN.
    """

    def __init__(
        self,
        handler: RequestHandler,
        queries: Queries,
        models: ModelRuntimes,
        keys: ApiKeys,
        router_id: str,
        drain: Drain,
        records: RecordFile,
        arrivals: Arrivals,
        warming: Warming,
    ) -> None:
        """Create the service; `drain` holds the streams in flight."""
        self._warming = warming
        self._records = records
        self._arrivals = arrivals
        self._reading = FairTurns(READING, READING_PER_TENANT)
        self._started_at = time.monotonic()
        self._handler = handler
        self._queries = queries
        self._models = models
        self._keys = keys
        self._router_id = router_id
        self._drain = drain

    def add_to(self, server: grpc.aio.Server) -> None:
        # With keys, a message is read after its tenant was charged for it; without, reading at once costs less.
        make = grpc.stream_stream_rpc_method_handler if self._keys.required else grpc.unary_stream_rpc_method_handler
        handlers: dict[str, Any] = {
            "Generate": make(self.Generate),
            "GenerateBatch": make(self.GenerateBatch, response_serializer=pb.BatchResult.SerializeToString),
        }
        unary: dict[str, tuple[Callable[[Any, Any], Awaitable[Any]], type[Any]]] = {
            "Explain": (self.Explain, pb.GenerateRequest),
            "Decisions": (self.Decisions, pb.DecisionsRequest),
            "Tokenize": (self.Tokenize, pb.TokenizeRequest),
            "ListModels": (self.ListModels, pb.ListModelsRequest),
            "ClusterStatus": (self.ClusterStatus, pb.ClusterStatusRequest),
            "Feedback": (self.Feedback, pb.FeedbackRequest),
            "Usage": (self.Usage, pb.UsageRequest),
            "Warm": (self.Warm, pb.WarmRequest),
        }
        for name, (method, request) in unary.items():
            handlers[name] = grpc.unary_unary_rpc_method_handler(
                _typed(method, request, self._arrivals.pace),
                response_serializer=_serialised,
            )
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(NAME, handlers)])

    async def Generate(self, payload: bytes | AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        traceparent.set(from_metadata(context.invocation_metadata()))
        async with self._answering(context) as answer:
            answer.begin()
            principal = self._principal(context)
            message = CallMessage(payload, self._reading)
            del payload
            async with self._arriving(message, principal) as (request, arrival):
                stream = self._generate(request, context, principal, arrival)
                async with contextlib.aclosing(stream) as messages:
                    async for batch in messages:
                        answer.sends()
                        if len(batch) == 1:
                            yield batch[0]
                        else:
                            for response in joined(batch):
                                yield response.SerializeToString()
                        answer.sent()

    async def GenerateBatch(self, payload: bytes | AsyncIterator[bytes], context: Any) -> AsyncIterator[pb.BatchResult]:
        traceparent.set(from_metadata(context.invocation_metadata()))
        async with self._answering(context) as answer:
            answer.begin()
            principal = self._principal(context)
            tenant, message = principal.tenant or "", CallMessage(payload, self._reading)
            del payload
            # A call whose key names its tenant is charged as its first request, before it is read. Without keys each
            # request may name a tenant of its own, so each is charged when it is read.
            is_known = principal.tenant is not None
            with self._arrivals.arriving(tenant, is_charged=not is_known) as arrival:
                raw = await message.read(tenant)
                arrival.hold(len(raw))
                request = parsed(pb.GenerateBatchRequest, raw)
                del raw

                def generate(number: int, one: pb.GenerateRequest) -> AsyncGenerator[Sequence[bytes]]:
                    return self._generate(one, context, principal, is_charged=is_known and number == 0)

                each = generate_batch(request, generate)
                async with contextlib.aclosing(each) as results:
                    async for result in results:
                        answer.sends()
                        yield result
                        answer.sent()

    def _generate(
        self,
        request: pb.GenerateRequest,
        context: Any,
        principal: Principal,
        arrival: Arrival | None = None,
        is_charged: bool = False,
    ) -> AsyncGenerator[Sequence[bytes]]:
        """Return a request's messages, with their parts where the client wants these."""
        start = partial(
            self._handler.generate,
            request,
            context.time_remaining(),
            principal,
            arrival=arrival,
            is_charged=is_charged,
        )
        return generate_parts(lambda checked: start(on_checked=checked)) if request.parse_output else start()

    @contextlib.asynccontextmanager
    async def _arriving(
        self, message: CallMessage, principal: Principal
    ) -> AsyncIterator[tuple[pb.GenerateRequest, Arrival]]:
        """Charge and count a request, read and parse it; charged first where the key says whose it is.

        Raises ServiceError.
        """
        if principal.tenant is None:
            raw = await message.read("")
            request = parsed(pb.GenerateRequest, raw)
            with self._arrivals.arriving(tenant_of(request, principal)) as arrival:
                arrival.hold(len(raw))
                del raw
                yield request, arrival
            return
        with self._arrivals.arriving(principal.tenant) as arrival:
            raw = await message.read(principal.tenant)
            arrival.hold(len(raw))
            request = parsed(pb.GenerateRequest, raw)
            del raw
            tenant_of(request, principal)
            yield request, arrival

    @contextlib.asynccontextmanager
    async def _answering(self, context: Any) -> AsyncIterator["_GrpcReply"]:
        """Run a call whose errors become statuses, and which a stopping router ends."""
        answer = _GrpcReply(Draining(f"router {self._router_id} was told to stop"), self._drain.draining)
        # In flight until its client was told how it ended: the server stops as soon as nothing is in flight.
        with self._drain.holding(answer.end):
            try:
                async with answer.block:
                    yield answer
            except ServiceError as error:
                await self._arrivals.pace.wait(error)
                end_call(context, error)
            except asyncio.CancelledError:
                # gRPC does not tell whether the client left. A client that did reads no status; another was cut off by
                # a part of this router, and must not read a CANCELLED that it never asked for.
                end_call(context, Unavailable(f"router {self._router_id} cut the stream off"))

    async def Explain(self, request: pb.GenerateRequest, context: Any) -> pb.Explanation:
        principal = self._principal(context)
        explained = await self._queries.explain(request, context.time_remaining(), principal)
        prepared, candidates = explained.prepared, explained.candidates
        return pb.Explanation(
            prompt_tokens=explained.demand.num_tokens,
            usable_blocks=explained.demand.num_usable_blocks,
            candidates=[candidate_of(candidate) for candidate in candidates[: num_shown(principal)]],
            num_candidates=len(candidates),
            model=prepared.model.name,
            model_reason=prepared.model_reason,
            models=map(compared, prepared.verdicts),
            reserved_output_tokens=candidates[0].reserved_output_tokens if candidates else 0,
            reservation=candidates[0].reservation if candidates else "",
        )

    async def Warm(self, request: pb.WarmRequest, context: Any) -> pb.WarmResponse | None:
        traceparent.set(from_metadata(context.invocation_metadata()))
        principal = self._principal(context)
        tenant = tenant_of(pb.GenerateRequest(tenant=request.tenant), principal)
        async with self._answering(context) as answer:
            answer.begin()
            with self._arrivals.arriving(tenant) as arrival:
                arrival.hold(request.ByteSize())
                return await self._warming.warm(request, context.time_remaining(), principal, arrival)

    async def Decisions(self, request: pb.DecisionsRequest, context: Any) -> pb.DecisionsResponse:
        principal = self._principal(context)
        past = self._queries.record(request.request_id, principal)
        return await asyncio.to_thread(to_response, past, num_shown(principal))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return await self._queries.tokenize(request, self._principal(context))

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=map(_listed, self._models.only(self._principal(context).models).listed()))

    def _principal(self, context: Any) -> Principal:
        """Return the caller.

        Raises Unauthenticated.
        """
        return self._keys.principal(bearer_of(context.invocation_metadata()))

    async def ClusterStatus(self, request: pb.ClusterStatusRequest, context: Any) -> pb.ClusterStatusResponse:
        self._principal(context).check_operator()
        return self.status()

    def status(self) -> pb.ClusterStatusResponse:
        """Return the cluster as this router sees it now."""
        isolates = self._queries.isolates_tenants
        return cluster_status(self._router_id, self._drain.draining, self._models, self._started_at, isolates)

    async def Feedback(self, request: pb.FeedbackRequest, context: Any) -> pb.FeedbackResponse:
        principal = self._principal(context)
        self._arrivals.charge(principal.tenant or "")
        self._records.feedback(request, principal)
        return pb.FeedbackResponse()

    async def Usage(self, request: pb.UsageRequest, context: Any) -> pb.UsageResponse:
        principal = self._principal(context)
        self._arrivals.charge(principal.tenant or "")
        totals = await self._queries.usage(request.days or 1, request.tenant, principal)
        return pb.UsageResponse(totals=[pb.UsageTotal(**asdict(total)) for total in totals])


@dataclass(slots=True)
class _GrpcReply:
    """A stream of messages, and its end when the router is stopping."""

    stopped: Draining
    draining: bool
    """Whether the router was told to stop before."""
    block: Endable = field(default_factory=Endable)
    sending: bool = False
    """Whether gRPC is sending a message on the same task; cancelled there, the call would end without a status."""
    over: bool = False

    def begin(self) -> None:
        """Raise Draining where no stream may begin any more."""
        if self.draining:
            raise self.stopped

    def end(self) -> None:
        self.over = True
        if not self.sending:
            self.block.end(self.stopped)

    def sends(self) -> None:
        """Begin to send a message.

        Raises Draining.
        """
        if self.over:
            raise self.stopped
        self.sending = True

    def sent(self) -> None:
        """Finish sending a message.

        Raises Draining.
        """
        self.sending = False
        if self.over:
            raise self.stopped


def _typed(
    method: Callable[[Any, Any], Awaitable[Any]], kind: type[Any], pace: RefusalPace
) -> Callable[[bytes, Any], Awaitable[Any]]:
    """Wrap a method so that its errors become statuses."""

    async def call(raw: bytes, context: Any) -> Any:
        try:
            return await method(parsed(kind, raw), context)
        except ServiceError as error:
            await pace.wait(error)
            end_call(context, error)
            return None

    return call


def _serialised(response: Message | None) -> bytes:
    """Return the bytes of an answer; a call that ended with an error has none."""
    return b"" if response is None else response.SerializeToString()


def _listed(model: ModelRuntime) -> pb.Model:
    shown = model.shown()
    pooler = shown.pooler
    workers = [worker for worker in model.workers() if worker.load is not None and not worker.draining]
    num_decode = sum(worker.decodes for worker in workers)
    prices = model.costs.prices
    return pb.Model(
        name=model.name,
        max_context_tokens=shown.model_dir.max_context_tokens,
        vocab_size=shown.model_dir.vocab_size,
        prefill_workers=len(workers) - num_decode,
        decode_workers=num_decode,
        has_tokenizer=shown.encoder.has_tokenizer,
        input_per_million=prices.input_per_million if prices else None,
        output_per_million=prices.output_per_million if prices else None,
        quality=model.entry.quality,
        tasks=model.entry.tasks,
        base_model=model.base_model,
        embedding_dimensions=pooler.dimensions if pooler is not None and not pooler.classifies else 0,
        labels=shown.model_dir.labels if pooler is not None and pooler.classifies else (),
    )
