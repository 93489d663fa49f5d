"""One loan given here: forwards the borrower's messages to the engine, which decides, and the answers back."""

import functools
import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator

from cluster.errors import Incompatible, InvalidRequest, Overloaded, ServiceError, Unavailable
from engine.media.item_messages import read_items
from engine.messages.from_engine import LendReady, LendRefused, LendStarting
from engine.messages.to_engine import Lend, LendClosed, LendReleased, PlacementMark
from engine.model.detokenizer import check_token_ids
from engine.process.front.engine_client import EngineMessage
from engine.worker.front.lender_streams import Borrowing, LoanChain
from engine.worker.runtime import WorkerContext
from kvcache.block_keys import unpack_tokens
from kvcache.items import items_fault
from loans.fast_path import ADDRESS_BYTES
from protos import lend_pb2 as pb

log = logging.getLogger(__name__)
READY_BYTES = 1 << 20
"""Approximate bytes of fingerprints in one message; those of a million tokens would exceed the message limit."""


class LendCall:
    """A loan from construction until `close`, during which the engine holds its blocks."""

    def __init__(self, context: WorkerContext, loan_id: str, want: pb.Want, on_news: Callable[[], object]) -> None:
        """Open the loan.

        `on_news` is called whenever there is something to `take`, or a `failure`.

        Raises ServiceError for a loan that cannot start.
        """
        lend = _lend(context, loan_id, want)
        self._context = context
        self._loan_id = loan_id
        self._on_change = on_news
        self._changed: deque[pb.LoanResponse] = deque()
        self._open = True
        self.failure: ServiceError | None = None
        """Reason why the loan is over, or None."""
        self._source = Borrowing(context.lenders, loan_id, want.source, functools.partial(_chain, want))
        context.engine.send(lend)
        context.engine.listen(loan_id, self._on_message)
        self._call = context.loans.hold(lambda: self._fail(Overloaded("this worker was told to stop")))

    def take(self) -> pb.LoanResponse | None:
        """Return the next pending response without its loan number, or None."""
        return self._changed.popleft() if self._changed else None

    def release(self, first: int, count: int) -> None:
        self._context.engine.send(LendReleased(self._loan_id, first, count))

    def close(self) -> None:
        """Release everything the engine holds for the loan.

        May be called again.
        """
        if self._open:
            self._open = False
            self._context.loans.release(self._call)
            self._source.cancel()
            self._context.engine.send(LendClosed(self._loan_id))
            self._context.engine.forget(self._loan_id)

    def _on_message(self, message: EngineMessage) -> None:
        if self._source.handle(message) or self.failure is not None:
            return
        match message:
            case LendStarting(_, end_block, cached_end_block, queued_ms):
                starting = pb.Starting(
                    incarnation=self._context.incarnation,
                    endpoint=self._context.ready.endpoint,
                    end_block=end_block,
                    cached_end_block=cached_end_block,
                    queued_ms=queued_ms,
                )
                self._changed.append(pb.LoanResponse(starting=starting))
                self._on_change()
            case LendReady():
                self._changed += (pb.LoanResponse(blocks_ready=ready) for ready in announcements(message))
                self._on_change()
            case LendRefused(_, reason, bad_request):
                self._fail(InvalidRequest("release", reason) if bad_request else Overloaded(reason))
            case None:
                self._fail(Unavailable("the lender's engine process has ended"))
            case _:
                raise AssertionError(f"unexpected {message!r}")

    def _fail(self, failure: ServiceError) -> None:
        if self.failure is None:
            self.failure = failure
            self._on_change()


def announcements(message: LendReady) -> Iterator[pb.BlocksReady]:
    """Split one announcement into messages below the size limit."""
    width = len(message.fingerprints) // len(message.block_ids)
    count = max(1, READY_BYTES // width)
    for start in range(0, len(message.block_ids), count):
        yield pb.BlocksReady(
            first=message.first + start,
            block_ids=message.block_ids[start : start + count],
            fingerprints=message.fingerprints[start * width : (start + count) * width],
            fetched=message.fetched,
        )


def _lend(context: WorkerContext, loan_id: str, want: pb.Want) -> Lend:
    if want.lender_incarnation != context.incarnation:
        raise Incompatible("does not match: another worker process listens at this address now", "lender_incarnation")
    if want.may_compute:  # a loan that computes nothing is allowed while draining: blocks stay readable until the end
        context.check_taking()
    if want.model_fingerprint != context.ready.model_fingerprint:
        raise Incompatible("weights, layout or dtype differ from the borrower's", "model_fingerprint")
    tokens = _tokens(want)
    check_token_ids(tokens, "token_ids", context.ready.vocab_size)
    if want.fast_path and len(want.fast_path) != ADDRESS_BYTES:
        raise InvalidRequest("fast_path", f"must have {ADDRESS_BYTES} bytes, not {len(want.fast_path)}")
    items = read_items(want.items)
    if fault := items_fault(items, len(tokens)):
        raise InvalidRequest("items", fault)
    num_blocks = want.end_block or len(tokens) // context.ready.block_tokens
    if num_blocks * context.ready.block_tokens > len(tokens):
        raise InvalidRequest("end_block", f"must not be beyond the {len(tokens)} tokens, it is {num_blocks}")
    if want.first_block >= num_blocks:
        raise InvalidRequest("first_block", f"must be below the prompt's {num_blocks} blocks, not {want.first_block}")
    return Lend(
        loan_id=loan_id,
        token_ids=tokens,
        first_block=want.first_block,
        cache_salt=want.cache_salt,
        adapter=want.adapter,
        may_compute=want.may_compute,
        priority=want.priority,
        mark=PlacementMark(want.router_id, want.placement_sequence),
        borrow=want.HasField("source"),
        reads_store=want.reads_store,
        fast_path=context.faults.fast_path(want.fast_path),
        items=items,
        end_block=want.end_block,
    )


def _tokens(want: pb.Want) -> "array[int]":
    try:
        return unpack_tokens(want.token_ids)
    except ValueError as error:
        raise InvalidRequest("token_ids", f"{len(want.token_ids)} bytes are not a whole number of uint32") from error


def _chain(want: pb.Want) -> LoanChain:
    """Return the chain that the loan reads from its source; without a placement, since a source computes nothing."""
    items = read_items(want.items)
    return LoanChain(want.request_id, _tokens(want), want.cache_salt, want.adapter, want.priority, "", 0, items=items)
