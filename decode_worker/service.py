"""The Decode service: runs placed requests on the engine, with loans from the lenders the router chose."""

import functools
import itertools
from collections.abc import AsyncIterator
from typing import Any

from cluster.errors import Draining, Incompatible, ServiceError, to_status
from decode_worker.generation import Generation
from decode_worker.placed_request import check_request, engine_request, lead_tokens
from engine.messages import Cancel, FromEngine, LendClosed
from engine.text import load_tokenizer
from engine.worker.engine_client import Mailbox
from engine.worker.loan_stream import Borrowing, Chain
from engine.worker.runtime import WorkerContext
from protos import decode_pb2 as pb
from protos import decode_pb2_grpc as pb_grpc
from protos import inference_pb2 as public_pb


class DecodeService(pb_grpc.DecodeServicer):
    """One stream is one attempt at a request; when it ends, nothing of the request is left here but its cache."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._engine = context.engine
        self._tokenizer = load_tokenizer(context.model_dir)
        self._numbers = itertools.count(1)

    async def Generate(self, request: pb.DecodeRequest, context: Any) -> AsyncIterator[public_pb.GenerateResponse]:
        engine_id = f"request-{next(self._numbers)}"  # not the client's id, which may come twice
        mailbox = self._engine.open_mailbox(engine_id)
        ready = self._context.ready
        try:
            if request.worker_incarnation != self._context.incarnation:
                raise Incompatible("this worker is another one than the one asked", "worker_incarnation")
            self._context.check_taking()
            check_request(request, ready.vocab_size, self._context.config.engine)
            generation = Generation(request, self._tokenizer, self._context.worker_id, ready.block_tokens)
            # The letter says nothing: it wakes a stream that waits.
            with self._context.requests.holding(lambda: mailbox.put_nowait(LendClosed(engine_id))):
                async for response in self._run(engine_id, request, mailbox, generation):
                    yield response
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
        finally:
            self._engine.send(Cancel(engine_id))
            self._engine.close_mailbox(engine_id)

    async def _run(
        self, engine_id: str, request: pb.DecodeRequest, mailbox: Mailbox, generation: Generation
    ) -> AsyncIterator[public_pb.GenerateResponse]:
        chain = functools.partial(_chain, request)
        loan = Borrowing(self._context.lenders, engine_id, request.lender.worker, chain)
        self._engine.send(engine_request(engine_id, request))
        try:
            while not generation.finished:
                for message in await _drain(mailbox):
                    if not await loan.handle(message) and not generation.finished:
                        generation.absorb(message)
                for choice in generation.take_stopped():
                    self._engine.send(Cancel(engine_id, choice))
                while (response := generation.take()) is not None:
                    yield response
                if self._context.requests.over and not generation.finished:
                    raise Draining(f"worker {self._context.worker_id} was told to stop and hands the request over")
        finally:
            await loan.cancel()


def _chain(request: pb.DecodeRequest) -> Chain:
    """What the request borrows."""
    return Chain(
        request_id=request.request_id,
        token_ids=lead_tokens(request),
        cache_salt=request.cache_salt,
        priority=request.priority,
        router_id=request.router_id,
        placement_sequence=request.placement_sequence,
        source=request.lender.source if request.lender.HasField("source") else None,
    )


def add_decode_service(server: Any, context: WorkerContext) -> list[str]:
    pb_grpc.add_DecodeServicer_to_server(DecodeService(context), server.grpc)
    return ["tandem.internal.v1.Decode"]


async def _drain(mailbox: Mailbox) -> list[FromEngine | LendClosed | None]:
    """At least one message, and all that came with it."""
    messages = [await mailbox.get()]
    while not mailbox.empty():
        messages.append(mailbox.get_nowait())
    return messages
