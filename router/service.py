"""The public Inference service."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from cluster.drain import Drain
from cluster.errors import Draining, ServiceError, to_status
from engine.model_dir import ModelDir
from protos import inference_pb2 as pb
from router.candidates import Candidate
from router.fleet import Fleet
from router.prompts import PromptEncoder
from router.serving import Serving

NAME = "tandem.v1.Inference"
MAX_EXPLAINED = 256
"""Candidates of an answer, the cheapest ones: a fleet of hundreds has tens of thousands."""


class InferenceService:
    """Registered by hand instead of by its generated base: Generate passes messages through as bytes."""

    def __init__(
        self, serving: Serving, fleet: Fleet, model_dir: ModelDir, encoder: PromptEncoder, drain: Drain
    ) -> None:
        """`drain` holds the streams under way."""
        self._serving = serving
        self._drain = drain
        self._fleet = fleet
        self._model_dir = model_dir
        self._encoder = encoder

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.Generate, request_deserializer=pb.GenerateRequest.FromString
            ),
            "Explain": grpc.unary_unary_rpc_method_handler(
                self.Explain,
                request_deserializer=pb.GenerateRequest.FromString,
                response_serializer=pb.Explanation.SerializeToString,
            ),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.ListModels,
                request_deserializer=pb.ListModelsRequest.FromString,
                response_serializer=pb.ListModelsResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(NAME, handlers)])

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[bytes]:
        stopped = Draining(f"router {self._fleet.router_id} was told to stop")
        task = asyncio.current_task()
        assert task is not None
        try:
            if self._drain.draining:
                raise stopped
            responses = self._serving.generate(request, context.time_remaining())
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

    async def Explain(self, request: pb.GenerateRequest, context: Any) -> pb.Explanation:
        try:
            demand, candidates = await self._serving.explain(request, context.time_remaining())
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
            raise  # the line above did
        return pb.Explanation(
            prompt_tokens=demand.num_tokens,
            usable_blocks=demand.num_usable_blocks,
            candidates=[_candidate(candidate) for candidate in candidates[:MAX_EXPLAINED]],
            num_candidates=len(candidates),
        )

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        workers = [worker for worker in self._fleet.workers if worker.load is not None]
        num_decode = sum(worker.decodes for worker in workers)
        model = pb.Model(
            name=self._model_dir.name,
            max_context_tokens=self._model_dir.max_context_tokens,
            vocab_size=self._model_dir.vocab_size,
            prefill_workers=len(workers) - num_decode,
            decode_workers=num_decode,
            has_tokenizer=self._encoder.has_tokenizer,
        )
        return pb.ListModelsResponse(models=[model])


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
