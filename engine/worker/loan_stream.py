"""Loans that this engine takes, as the front sees them: a stream to each lender, opened and closed as the engine says.

What the lender says goes to the engine, and the engine's releases go back.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import grpc

from cluster.errors import from_rpc_error
from cluster.rpc import Channels
from cluster.tls import Trust
from cluster.waker import Waker
from engine.keys import pack_tokens
from engine.messages import (
    CloseLoan,
    LoanBlocks,
    LoanFailed,
    LoanStarted,
    OpenLoan,
    ReleaseLoan,
)
from engine.worker.engine_client import EngineClient
from protos import lend_pb2 as pb
from protos import lend_pb2_grpc as pb_grpc

BEATS_PER_SILENCE = 5
"""Heartbeats in the time after which a silent borrower is given up. A loan that takes less than one needs none."""
log = logging.getLogger(__name__)
_running: set[asyncio.Task[None]] = set()
"""The loop itself keeps no task alive."""


class LoanStream:
    """Opened by the engine's OpenLoan, closed by its CloseLoan or by the end of the request.

    A lender that says nothing for `silence_s`, heartbeats included, is given up. To the lender this side says that its
    engine's loop turns, as long as it does.
    """

    def __init__(
        self,
        link: AbstractContextManager[grpc.aio.Channel],
        want: pb.Want,
        engine_id: str,
        engine: EngineClient,
        silence_s: float,
    ) -> None:
        """`link` is entered here, and left when the stream has ended."""
        self._engine_id = engine_id
        self._engine = engine
        self._silence_s = silence_s
        self._closed = False
        self._released: list[pb.LendRequest] = []
        self._waker = Waker()
        with ExitStack() as stack:
            self._call = pb_grpc.LendStub(stack.enter_context(link)).Lend(self._requests(want))
            release_link = stack.pop_all().close
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(lambda _: release_link())  # also of one that was cancelled before it began
        _running.add(self._task)
        self._task.add_done_callback(_running.discard)

    def release(self, first: int, count: int) -> None:
        self._released.append(pb.LendRequest(release=pb.Release(first=first, count=count)))
        self._waker.wake()

    def close(self) -> None:
        """Half-close: the lender lets go of everything. Nothing more is forwarded to the engine."""
        self._closed = True
        self._waker.wake()

    def cancel(self) -> None:
        """The request is over: end the stream now."""
        self._closed = True
        self._task.cancel()
        self._call.cancel()  # the task may not have begun
        self._waker.wake()

    async def _requests(self, want: pb.Want) -> AsyncIterator[pb.LendRequest]:
        """What this side says, until it closes: with that, what was not released yet is."""
        yield pb.LendRequest(want=want)
        loop = asyncio.get_running_loop()
        reported = asyncio.Event()
        next_beat = loop.time() + self._silence_s / BEATS_PER_SILENCE
        with self._engine.watching(lambda _: reported.set()):
            while not self._closed:
                if self._released:
                    yield self._released.pop(0)
                    continue
                timer = loop.call_at(next_beat, self._waker.wake)
                await self._waker.sleep()
                timer.cancel()
                if loop.time() >= next_beat:
                    next_beat = loop.time() + self._silence_s / BEATS_PER_SILENCE
                    if reported.is_set():
                        reported.clear()
                        yield pb.LendRequest(heartbeat=pb.Heartbeat())

    async def _run(self) -> None:
        failure = "the borrower's side of the loan broke"
        try:
            await self._follow()
            failure = "the lender ended the stream"
        except grpc.aio.AioRpcError as error:
            failure = str(from_rpc_error(error))
        except TimeoutError:
            failure = f"the lender was silent for {self._silence_s:g} s"
        finally:
            self._call.cancel()
            if not self._closed:
                self._closed = True
                log.info("loan of %s failed: %s", self._engine_id, failure)
                self._engine.send(LoanFailed(self._engine_id, failure))
            self._waker.wake()

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._silence_s) as silence:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                silence.reschedule(loop.time() + self._silence_s)
                assert isinstance(response, pb.LendResponse)
                if not self._closed:
                    self._forward(response)

    def _forward(self, response: pb.LendResponse) -> None:
        match response.WhichOneof("message"):
            case "starting":
                said = response.starting
                started = LoanStarted(
                    self._engine_id, said.endpoint, said.end_block, said.cached_end_block, said.queued_ms
                )
                self._engine.send(started, *([self._blocks(said.ready)] if said.HasField("ready") else []))
            case "blocks_ready":
                self._engine.send(self._blocks(response.blocks_ready))

    def _blocks(self, ready: pb.BlocksReady) -> LoanBlocks:
        return LoanBlocks(self._engine_id, ready.first, tuple(ready.block_ids), ready.fingerprints, ready.fetched)


@dataclass(frozen=True, slots=True)
class Chain:
    """What a loan is of."""

    request_id: str
    """The client's, for logs."""
    token_ids: Sequence[int]
    cache_salt: str
    priority: int
    router_id: str
    placement_sequence: int
    source: pb.Holder | None = None
    """From whom the lender may read what it lacks."""


class Borrowing:
    """The loan of one request, or of one loan given: at most one at a time."""

    def __init__(self, lenders: "Lenders", engine_id: str, holder: pb.Holder, chain: Callable[[], Chain]) -> None:
        """`holder` is who lends; `chain` is asked only when a loan is opened."""
        self._lenders = lenders
        self._engine_id = engine_id
        self._holder = holder
        self._chain = chain
        self._stream: LoanStream | None = None

    def handle(self, message: object) -> bool:
        """Perform what the engine says of the loan; False when the message is about something else."""
        match message:
            case OpenLoan():
                assert self._stream is None
                self._stream = self._lenders.open(self._engine_id, self._holder, self._chain(), message)
            case ReleaseLoan(_, first, count):
                if self._stream is not None:
                    self._stream.release(first, count)
            case CloseLoan():
                if self._stream is not None:
                    self._stream.close()
            case _:
                return False
        return True

    def cancel(self) -> None:
        """Nobody wants it any more."""
        if self._stream is not None:
            self._stream.cancel()


class Lenders:
    """Channels to the workers that this one borrows from."""

    def __init__(
        self,
        engine: EngineClient,
        model_fingerprint: bytes,
        block_tokens: int,
        silence_s: float,
        trust: Trust | None = None,
    ) -> None:
        self._engine = engine
        self._model_fingerprint = model_fingerprint
        self._block_tokens = block_tokens
        self._silence_s = silence_s
        self._channels = Channels(trust)

    def open(self, engine_id: str, holder: pb.Holder, chain: Chain, wanted: OpenLoan) -> LoanStream:
        want = pb.Want(
            request_id=chain.request_id,
            lender_incarnation=holder.incarnation,
            model_fingerprint=self._model_fingerprint,
            cache_salt=chain.cache_salt,
            token_ids=pack_tokens(chain.token_ids[: wanted.end_block * self._block_tokens]),
            first_block=wanted.first_block,
            may_compute=wanted.may_compute,
            priority=chain.priority,
            router_id=chain.router_id,
            placement_sequence=chain.placement_sequence,
            source=chain.source if wanted.may_compute else None,
        )
        return LoanStream(self._channels.using(holder.address), want, engine_id, self._engine, self._silence_s)
