"""The public Inference service."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from cluster.drain import Drain
from cluster.errors import Draining, InvalidRequest, ServiceError, to_status
from protos import inference_pb2 as pb
from router.api_keys import ApiKeys, Principal
from router.candidates import Candidate
from router.guard import bearer_of
from router.model_choice import Verdict
from router.served_model import ServedModel, ServedModels
from router.serving import Serving

Parsed = TypeVar("Parsed", pb.GenerateRequest, pb.ListModelsRequest)
NAME = "tandem.v1.Inference"
MAX_EXPLAINED = 256
"""Candidates of an answer, the cheapest ones: a fleet of hundreds has tens of thousands."""


class InferenceService:
    """Registered by hand instead of by its generated base: Generate passes messages through as bytes, and bytes that
    are no message get an answer as any other wrong request, where gRPC's own would be UNKNOWN."""

    def __init__(self, serving: Serving, models: ServedModels, keys: ApiKeys, router_id: str, drain: Drain) -> None:
        """`drain` holds the streams under way."""
        self._serving = serving
        self._models = models
        self._keys = keys
        self._router_id = router_id
        self._drain = drain

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {
            "Generate": grpc.unary_stream_rpc_method_handler(self.Generate),
            "Explain": grpc.unary_unary_rpc_method_handler(
                self.Explain,
                response_serializer=pb.Explanation.SerializeToString,
            ),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.ListModels,
                response_serializer=pb.ListModelsResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(NAME, handlers)])

    async def Generate(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        stopped = Draining(f"router {self._router_id} was told to stop")
        task = asyncio.current_task()
        assert task is not None
        try:
            if self._drain.draining:
                raise stopped
            principal = self._principal(context)
            responses = self._serving.generate(_parsed(pb.GenerateRequest, raw), context.time_remaining(), principal)
            with self._drain.holding(task.cancel):
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        yield response
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
        except asyncio.CancelledError:
            if not self._drain.over or context.cancelled():
                raise
            task.uncancel()  # by us, and not because its client went
            await context.abort_with_status(to_status(stopped))

    async def Explain(self, raw: bytes, context: Any) -> pb.Explanation:
        try:
            principal = self._principal(context)
            explained = await self._serving.explain(
                _parsed(pb.GenerateRequest, raw), context.time_remaining(), principal
            )
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
            raise  # the line above did
        ticket, candidates = explained.ticket, explained.candidates
        return pb.Explanation(
            prompt_tokens=explained.demand.num_tokens,
            usable_blocks=explained.demand.num_usable_blocks,
            candidates=[_candidate(candidate) for candidate in candidates[:MAX_EXPLAINED]],
            num_candidates=len(candidates),
            model=ticket.model.name,
            model_reason=ticket.model_reason,
            models=map(_compared, ticket.verdicts),
        )

    async def ListModels(self, raw: bytes, context: Any) -> pb.ListModelsResponse:
        try:
            principal = self._principal(context)
            _parsed(pb.ListModelsRequest, raw)
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
            raise  # the line above did
        return pb.ListModelsResponse(models=map(_listed, self._models.only(principal.models)))

    def _principal(self, context: Any) -> Principal:
        """Raises Unauthenticated."""
        return self._keys.principal(bearer_of(context.invocation_metadata()))


def _parsed(kind: type[Parsed], raw: bytes) -> Parsed:
    """Raises InvalidRequest."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest("request", f"is no {kind.DESCRIPTOR.name}: {error}") from None


def _listed(model: ServedModel) -> pb.Model:
    workers = [worker for worker in model.fleet.workers if worker.load is not None]
    num_decode = sum(worker.decodes for worker in workers)
    prices = model.costs.prices
    return pb.Model(
        name=model.name,
        max_context_tokens=model.model_dir.max_context_tokens,
        vocab_size=model.model_dir.vocab_size,
        prefill_workers=len(workers) - num_decode,
        decode_workers=num_decode,
        has_tokenizer=model.encoder.has_tokenizer,
        input_per_million=prices.input_per_million if prices else None,
        output_per_million=prices.output_per_million if prices else None,
        quality=model.entry.quality,
        tasks=model.entry.tasks,
    )


def _compared(verdict: Verdict) -> pb.ModelCandidate:
    option = verdict.option
    return pb.ModelCandidate(
        model=option.name,
        fit=verdict.fit,
        verdict=verdict.why,
        prompt_tokens=option.num_prompt_tokens,
        counted=option.counted,
        price=option.price,
        ttft_ms=None if option.ttft_s is None else option.ttft_s * 1e3,
    )


def _candidate(candidate: Candidate) -> pb.PlacementCandidate:
    return pb.PlacementCandidate(
        decode_worker=candidate.decode_id,
        lender=candidate.lender_id or "",
        lender_computes=candidate.lender_computes,
        source=candidate.source_id or "",
        blocks=candidate.num_blocks,
        lender_tokens=candidate.lender_tokens,
        decode_tokens=candidate.own_tokens,
        source_read_ms=candidate.source_read_s * 1e3,
        lender_queue_ms=candidate.lender_queue_s * 1e3,
        lender_compute_ms=candidate.lender_compute_s * 1e3,
        transfer_ms=candidate.transfer_s * 1e3,
        decode_queue_ms=candidate.decode_queue_s * 1e3,
        prompt_tail_ms=candidate.tail_s * 1e3,
        ttft_ms=candidate.ttft_s * 1e3,
        delay_ms=candidate.delay_s * 1e3,
        cost_ms=candidate.cost_s * 1e3,
    )
