"""The Lend service: translates between a borrower's stream and the engine, which decides everything."""

import asyncio
import functools
import itertools
import logging
import time
from array import array
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.message import DecodeError

from cluster.errors import Incompatible, InvalidRequest, Overloaded, ServiceError, Unavailable, to_status
from engine import messages
from engine.keys import unpack_tokens
from engine.messages import (
    CacheChanged,
    LendClosed,
    LendReady,
    LendRefused,
    LendReleased,
    LendStarting,
    Load,
    PlacementMark,
)
from engine.text import check_token_ids
from engine.worker.loan_stream import Borrowing, Chain
from engine.worker.runtime import WorkerContext
from prefill_worker.mailbox import Mailbox
from protos import lend_pb2 as pb
from protos import lend_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)
HEARTBEAT_S = 0.2
"""At most one heartbeat in so long, however often the engine reports."""


class LendService(pb_grpc.LendServicer):
    """One stream is one loan: whatever ends the stream releases all that is held for it, and so does a borrower that
    says nothing for `peer_silence_s`."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._engine = context.engine
        self._numbers = itertools.count(1)

    async def Lend(
        self, request_iterator: AsyncIterator[pb.LendRequest], context: Any
    ) -> AsyncIterator[pb.LendResponse]:
        loan_id = f"loan-{next(self._numbers)}"
        mailbox = Mailbox()
        self._engine.listen(loan_id, mailbox.put)
        try:
            first = await anext(request_iterator, None)
            if first is None or not first.HasField("want"):
                raise InvalidRequest("want", "must be the first message")
            self._engine.send(self._lend(loan_id, first.want))
            source = Borrowing(self._context.lenders, loan_id, first.want.source, functools.partial(_chain, first.want))
            stopped = LendRefused(loan_id, "this worker was told to stop", bad_request=False)
            with self._context.loans.holding(lambda: mailbox.put(stopped)):
                async for response in self._respond(loan_id, request_iterator, mailbox, source):
                    yield response
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
        finally:
            self._engine.send(LendClosed(loan_id))
            self._engine.forget(loan_id)

    def _lend(self, loan_id: str, want: pb.Want) -> messages.Lend:
        if want.lender_incarnation != self._context.incarnation:
            raise Incompatible("this worker is another one than the one asked", "lender_incarnation")
        if want.may_compute:  # what is held here can be read until nobody does
            self._context.check_taking()
        if want.model_fingerprint != self._context.ready.model_fingerprint:
            raise Incompatible("weights, layout or dtype differ from the borrower's", "model_fingerprint")
        tokens = _tokens(want)
        check_token_ids(tokens, "token_ids", self._context.ready.vocab_size)
        num_blocks = len(tokens) // self._context.ready.block_tokens
        if want.first_block >= num_blocks:
            raise InvalidRequest("first_block", f"no block wanted in [{want.first_block}, {num_blocks})")
        return messages.Lend(
            loan_id=loan_id,
            token_ids=tokens,
            first_block=want.first_block,
            cache_salt=want.cache_salt,
            may_compute=want.may_compute,
            priority=want.priority,
            mark=PlacementMark(want.router_id, want.placement_sequence),
            borrow=want.HasField("source"),
        )

    async def _respond(
        self, loan_id: str, requests: AsyncIterator[pb.LendRequest], mailbox: Mailbox, source: Borrowing
    ) -> AsyncIterator[pb.LendResponse]:
        """Until the borrower half-closes. Heartbeats are the engine's load reports."""
        beaten_at = time.monotonic()

        def beat(message: CacheChanged | Load) -> None:
            nonlocal beaten_at
            if isinstance(message, Load) and time.monotonic() - beaten_at >= HEARTBEAT_S:
                beaten_at = time.monotonic()
                mailbox.put(message)

        with self._engine.watching(beat):
            following = asyncio.ensure_future(self._follow_borrower(loan_id, requests, mailbox))
            try:
                while (message := await mailbox.get()) != LendClosed(loan_id):
                    if source.handle(message):
                        continue
                    response = self._translate(message)
                    if isinstance(message, LendStarting) and (ready := mailbox.take_if(LendReady)) is not None:
                        response.starting.ready.CopyFrom(self._translate(ready).blocks_ready)
                    yield response
            finally:
                source.cancel()
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _follow_borrower(self, loan_id: str, requests: AsyncIterator[pb.LendRequest], mailbox: Mailbox) -> None:
        """Pass releases on; at the end of the borrower's side, say so in the mailbox."""
        silence_s, loop = self._context.config.peer_silence_s, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(silence_s) as silence:
                async for request in requests:
                    silence.reschedule(loop.time() + silence_s)
                    match request.WhichOneof("message"):
                        case "heartbeat":
                            pass
                        case "release":
                            self._engine.send(LendReleased(loan_id, request.release.first, request.release.count))
                        case _:
                            mailbox.put(LendRefused(loan_id, "only releases may follow want", bad_request=True))
                            return
        except TimeoutError:
            log.info("the borrower of %s was silent for %g s", loan_id, silence_s)
            self._engine.send(LendClosed(loan_id))  # at once: what is said to a silent borrower may be stuck
            mailbox.put(LendClosed(loan_id))
        except DecodeError as error:  # bytes that are no message; unsaid, the blocks would stay lent
            mailbox.put(LendRefused(loan_id, str(error), bad_request=True))
        else:
            mailbox.put(LendClosed(loan_id))

    def _translate(self, message: object) -> pb.LendResponse:
        """Raises ServiceError for what ends the stream."""
        match message:
            case Load(step):
                return pb.LendResponse(heartbeat=pb.Heartbeat(step=step))
            case LendStarting(_, end_block, cached_end_block, queued_ms):
                starting = pb.Starting(
                    incarnation=self._context.incarnation,
                    endpoint=self._context.ready.endpoint,
                    end_block=end_block,
                    cached_end_block=cached_end_block,
                    queued_ms=queued_ms,
                )
                return pb.LendResponse(starting=starting)
            case LendReady(_, first, block_ids, fingerprints, fetched):
                ready = pb.BlocksReady(first=first, block_ids=block_ids, fingerprints=fingerprints, fetched=fetched)
                return pb.LendResponse(blocks_ready=ready)
            case LendRefused(_, reason, bad_request):
                raise InvalidRequest("release", reason) if bad_request else Overloaded(reason)
            case None:
                raise Unavailable("the lender's engine is gone")
        raise AssertionError(f"unexpected {message!r}")


def _tokens(want: pb.Want) -> "array[int]":
    try:
        return unpack_tokens(want.token_ids)
    except ValueError as error:
        raise InvalidRequest("token_ids", f"{len(want.token_ids)} bytes are no whole number of uint32") from error


def _chain(want: pb.Want) -> Chain:
    """What the loan reads from its source: no placement, since the source computes nothing for it."""
    return Chain(want.request_id, _tokens(want), want.cache_salt, want.priority, "", 0)


def add_lend_service(server: Any, context: WorkerContext) -> list[str]:
    """Both roles lend."""
    pb_grpc.add_LendServicer_to_server(LendService(context), server.grpc)
    return ["tandem.internal.v1.Lend"]
