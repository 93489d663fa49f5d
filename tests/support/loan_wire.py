"""Borrower and lender at the two ends of their stream, in memory: the link and the connection are the real ones, with
queues instead of gRPC between them, and scripted engines."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from cluster.errors import InvalidRequest, Overloaded, ServiceError
from engine.worker.front.loan_stream import LoanCall, LoanStream
from prefill_worker.borrower_stream import BorrowerStream
from protos import lend_pb2 as pb

SILENCE_S = 5.0


class Engine:
    """What a front has of its engine: here, what was sent to it, and that its loop turns."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.watchers: set[Callable[[object], None]] = set()

    def send(self, *messages: Any) -> None:
        self.told += messages

    @contextmanager
    def watching(self, watcher: Callable[[object], None]) -> Iterator[None]:
        self.watchers.add(watcher)
        try:
            yield
        finally:
            self.watchers.discard(watcher)

    def turn(self) -> None:
        for watcher in tuple(self.watchers):
            watcher(None)

    def told_of(self, name: str) -> list[Any]:
        return [message for message in self.told if message.request_id == name]


class GivenLoan:
    """Announces block 0, 1, 2 and so on when told to."""

    def __init__(self, want: pb.Want, on_news: Callable[[], object]) -> None:
        if want.request_id == "refused":
            raise Overloaded("no room", retry_after_s=1.5)
        if want.request_id == "bug":
            raise ZeroDivisionError
        self.on_news = on_news
        self.said = 0
        self.failure: ServiceError | None = None
        self.released: list[tuple[int, int]] = []
        self.closed = False
        self._changed: deque[pb.LoanResponse] = deque()

    def start(self) -> None:
        self._changed.append(pb.LoanResponse(starting=pb.Starting(end_block=99)))
        self.on_news()

    def say(self, count: int, num_bytes: int = 0) -> None:
        blocks = range(self.said, self.said + count)
        ready = pb.BlocksReady(first=self.said, block_ids=blocks, fingerprints=bytes(num_bytes))
        self._changed.append(pb.LoanResponse(blocks_ready=ready))
        self.said += count
        self.on_news()

    def fail(self) -> None:
        self.failure = InvalidRequest("release", "is wrong")
        self.on_news()

    def take(self) -> pb.LoanResponse | None:
        return self._changed.popleft() if self._changed else None

    def release(self, first: int, count: int) -> None:
        self.released.append((first, count))

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class Wire:
    """A channel whose only call leads to a connection here. `held`: frames to the borrower are held back."""

    def __init__(self) -> None:
        self.borrower, self.lender = Engine(), Engine()
        self.given: dict[str, GivenLoan] = {}
        self.connection = BorrowerStream(self._begin, self.lender, SILENCE_S)  # type: ignore[arg-type]
        self.held = asyncio.Event()
        self.held.set()
        self.num_frames = 0
        self.largest = 0
        """Bytes of a frame of the lender's."""
        self.times_broken = 0
        self.link = LoanStream(self, "p0", self.borrower, SILENCE_S, self._broken)  # type: ignore[arg-type]

    def open(self, name: str, size: int = 0) -> LoanCall:
        return self.link.open(name, pb.Want(request_id=name, token_ids=bytes(size)))

    def _begin(self, want: pb.Want, on_news: Callable[[], object]) -> Any:
        given = self.given[want.request_id] = GivenLoan(want, on_news)
        return given

    def _broken(self) -> None:
        self.times_broken += 1

    def __getattr__(self, kind: str) -> Any:
        return lambda *_, **__: lambda *requests: _Call(self, requests[0]) if requests else None


class _Call:
    def __init__(self, wire: Wire, frames: AsyncIterator[pb.BorrowerFrame]) -> None:
        self._wire = wire
        self._absorbing = asyncio.ensure_future(self._absorb(frames))

    async def _absorb(self, frames: AsyncIterator[pb.BorrowerFrame]) -> None:
        async for frame in frames:
            self._wire.num_frames += 1
            self._wire.connection.absorb(pb.BorrowerFrame.FromString(frame.SerializeToString()))

    async def __aiter__(self) -> AsyncIterator[pb.LenderFrame]:
        async for frame in self._wire.connection.frames():
            self._wire.num_frames += 1
            self._wire.largest = max(self._wire.largest, frame.ByteSize())
            await self._wire.held.wait()
            yield pb.LenderFrame.FromString(frame.SerializeToString())
        if self._wire.connection.failure is not None:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE,
                grpc.aio.Metadata(),
                grpc.aio.Metadata(),
                str(self._wire.connection.failure),
            )

    def cancel(self) -> None:
        self._absorbing.cancel()
        self._wire.connection.end()
