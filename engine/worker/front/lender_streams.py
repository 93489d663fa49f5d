"""Streams to the lenders of this worker, and the loan of each request."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import grpc

from cluster.network.rpc import Channels
from cluster.network.tls import TlsIdentity
from engine.media.item_messages import item_messages
from engine.messages.from_engine import CloseLoan, OpenLoan, ReleaseLoan
from engine.process.front.engine_client import EngineClient
from engine.worker.front.loan_stream import LoanCall, LoanStream
from kvcache.block_keys import pack_tokens
from kvcache.items import Item, begun_items
from protos import lend_pb2 as pb

CUT_OFF = "the lender is cut off from this worker, in a drill"


@dataclass(frozen=True, slots=True)
class LoanChain:
    """Token chain of a loan."""

    request_id: str
    """The client's request id, for logs."""
    token_ids: Sequence[int]
    cache_salt: str
    adapter: bytes
    """Fingerprint of the LoRA adapter; empty for none."""
    priority: int
    router_id: str
    placement_sequence: int
    source: pb.Holder | None = None
    """Worker from which the lender may read blocks it lacks."""
    reads_store: bool = False
    """Whether the placement counts on blocks that the lender reads from the shared store."""
    items: tuple[Item, ...] = ()
    """Items of the chain, in order of their places."""


class Borrowing:
    """Loan of one request, or of one loan given; at most one at a time."""

    def __init__(
        self, lenders: "LenderStreams", engine_id: str, holder: pb.Holder, chain: Callable[[], LoanChain]
    ) -> None:
        """Create it for the lender `holder`; `chain` is called only when a loan is opened."""
        self._lenders = lenders
        self._engine_id = engine_id
        self._holder = holder
        self._chain = chain
        self._loan: LoanCall | None = None

    def handle(self, message: object) -> bool:
        """Perform an engine message about the loan.

        Returns False when the message is about something else.
        """
        match message:
            case OpenLoan():
                assert self._loan is None
                self._loan = self._lenders.open(self._engine_id, self._holder, self._chain(), message)
            case ReleaseLoan(_, first, count):
                if self._loan is not None:
                    self._loan.release(first, count)
            case CloseLoan():
                if self._loan is not None:
                    self._loan.close()
            case _:
                return False
        return True

    def cancel(self) -> None:
        """End the loan."""
        if self._loan is not None:
            self._loan.close()


class LenderStreams:
    """Streams to lenders, each opened with the first loan from there, or before it."""

    def __init__(
        self,
        engine: EngineClient,
        model_fingerprint: bytes,
        block_tokens: int,
        silence_s: float,
        trust: TlsIdentity | None = None,
    ) -> None:
        self._engine = engine
        self._model_fingerprint = model_fingerprint
        self._block_tokens = block_tokens
        self._silence_s = silence_s
        self._channels = Channels(trust)
        self._links: dict[tuple[str, bytes], LoanStream] = {}
        """Streams by address and incarnation, since a restarted worker is another lender."""
        self._cut_off: dict[str, float] = {}
        """Lenders cut off in a drill: until when, in seconds of the monotonic clock, by worker id."""

    def open(self, engine_id: str, holder: pb.Holder, chain: LoanChain, wanted: OpenLoan) -> LoanCall:
        num_tokens = wanted.end_block * self._block_tokens
        if self._block_tokens > 1:  # draft layers read the next token; otherwise it would be a block more
            num_tokens += 1
        items = begun_items(chain.items, wanted.end_block * self._block_tokens)
        goes_on = bool(items) and items[-1].end > num_tokens
        if goes_on:  # the lender computes with whole items
            num_tokens = items[-1].end
        want = pb.Want(
            request_id=chain.request_id,
            lender_incarnation=holder.incarnation,
            model_fingerprint=self._model_fingerprint,
            cache_salt=chain.cache_salt,
            adapter=chain.adapter,
            token_ids=pack_tokens(chain.token_ids[:num_tokens]),
            first_block=wanted.first_block,
            may_compute=wanted.may_compute,
            priority=chain.priority,
            router_id=chain.router_id,
            placement_sequence=chain.placement_sequence,
            source=chain.source if wanted.may_compute else None,
            reads_store=chain.reads_store and wanted.may_compute,
            fast_path=wanted.fast_path,
            items=item_messages(items),
            end_block=wanted.end_block if goes_on else 0,
        )
        return self._link(holder).open(engine_id, want)

    @property
    def num_streams(self) -> int:
        return sum(not link.broken for link in self._links.values())

    def knows(self, holder: pb.Holder) -> bool:
        """Return whether there is a stream to a lender."""
        link = self._links.get((holder.address, holder.incarnation))
        return link is not None and not link.broken

    def connect(self, holder: pb.Holder) -> None:
        """Open the stream to a lender before its first loan."""
        self._link(holder)

    def channel(self, holder: pb.Holder) -> AbstractContextManager[grpc.aio.Channel]:
        """Return the channel to a worker, which stays open within the block."""
        return self._channels.using(holder.address)

    def cut_off(self, worker_id: str, seconds: float) -> None:
        """Break the streams to a lender and fail all new loans from there for `seconds`, for a drill."""
        self._cut_off[worker_id] = time.monotonic() + seconds
        for link in self._links.values():
            if link.name == worker_id:
                link.break_off(CUT_OFF)

    def _link(self, holder: pb.Holder) -> LoanStream:
        key = holder.address, holder.incarnation
        if (link := self._links.get(key)) is None or link.broken:
            self._links = {key: link for key, link in self._links.items() if not link.broken}
            held = ExitStack()
            channel = held.enter_context(self._channels.using(holder.address))
            link = self._links[key] = LoanStream(channel, holder.worker_id, self._engine, self._silence_s, held.close)
        if time.monotonic() < self._cut_off.get(holder.worker_id, -math.inf):
            link.break_off(CUT_OFF)
        return link
