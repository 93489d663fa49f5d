"""The Decode service: runs placed requests on the engine, with loans from the lenders the router chose."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc

from cluster.errors import Incompatible, ServiceError, to_status
from cluster.rpc import channel
from decode_worker.generation import Generation
from decode_worker.loan_stream import LoanStream
from decode_worker.placed_request import check_request, engine_request, lead_tokens
from engine.messages import (
    Cancel,
    CloseLoan,
    FromEngine,
    LendClosed,
    OpenLoan,
    ReleaseLoan,
)
from engine.text import load_tokenizer
from engine.worker.engine_client import Mailbox
from engine.worker.runtime import WorkerContext
from protos import decode_pb2 as pb
from protos import decode_pb2_grpc as pb_grpc
from protos import inference_pb2 as public_pb
from protos import lend_pb2


class DecodeService(pb_grpc.DecodeServicer):
    """One stream is one attempt at a request; when it ends, nothing of the request is left here but its cache."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._engine = context.engine
        self._tokenizer = load_tokenizer(context.model_dir)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._numbers = itertools.count(1)

    async def Generate(self, request: pb.DecodeRequest, context: Any) -> AsyncIterator[public_pb.GenerateResponse]:
        engine_id = f"request-{next(self._numbers)}"  # not the client's id, which may come twice
        mailbox = self._engine.open_mailbox(engine_id)
        ready = self._context.ready
        try:
            if request.worker_incarnation != self._context.incarnation:
                raise Incompatible("this worker is another one than the one asked", "worker_incarnation")
            check_request(request, ready.vocab_size, self._context.config.engine)
            generation = Generation(request, self._tokenizer, self._context.worker_id, ready.block_tokens)
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
        loan: LoanStream | None = None
        self._engine.send(engine_request(engine_id, request))
        try:
            while not generation.finished:
                for message in await _drain(mailbox):
                    match message:
                        case OpenLoan(_, first_block, end_block):
                            loan = self._open_loan(engine_id, request, first_block, end_block)
                        case ReleaseLoan(_, first, count) if loan is not None:
                            await loan.release(first, count)
                        case CloseLoan() if loan is not None:
                            await loan.close()
                        case _ if not generation.finished:
                            generation.absorb(message)
                for choice in generation.take_stopped():
                    self._engine.send(Cancel(engine_id, choice))
                while (response := generation.take()) is not None:
                    yield response
        finally:
            if loan is not None:
                await loan.cancel()

    def _open_loan(self, engine_id: str, request: pb.DecodeRequest, first_block: int, end_block: int) -> LoanStream:
        lender = request.lender
        if (link := self._channels.get(lender.address)) is None:
            link = self._channels[lender.address] = channel(lender.address)
        tokens = lead_tokens(request)
        ready = self._context.ready
        want = lend_pb2.Want(
            request_id=request.request_id,
            lender_incarnation=lender.incarnation,
            model_fingerprint=ready.model_fingerprint,
            cache_salt=request.cache_salt,
            token_ids=tokens[: end_block * ready.block_tokens],
            first_block=first_block,
            may_compute=True,
            priority=request.priority,
            router_id=request.router_id,
            placement_sequence=request.placement_sequence,
        )
        return LoanStream(link, want, engine_id, self._engine, self._context.config.peer_silence_s)


def add_decode_service(server: Any, context: WorkerContext) -> list[str]:
    pb_grpc.add_DecodeServicer_to_server(DecodeService(context), server.grpc)
    return ["tandem.internal.v1.Decode"]


async def _drain(mailbox: Mailbox) -> list[FromEngine | LendClosed | None]:
    """At least one message, and all that came with it."""
    messages = [await mailbox.get()]
    while not mailbox.empty():
        messages.append(mailbox.get_nowait())
    return messages
