"""Router and decode worker at the two ends of their stream, in memory: what any schedule of requests may do to it.

The link and the connection are the real ones; between them are queues instead of gRPC or TCP. Attempts are scripted.
"""

import asyncio
import gc
import random
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import DeadlineExceeded, InvalidRequest, Overloaded, ServiceError, Unavailable
from cluster.network.frame_stream import FrameStream
from decode_worker.router_stream import RouterStream, serve_router
from protos import decode_pb2 as pb
from protos import inference_pb2 as public_pb
from router.decode_client.decode_stream import PAUSE_AT, DecodeStream, GrpcDecodeStream
from router.decode_client.frame_decode_stream import FrameDecodeStream
from support.frame_pair import MemoryTransport, opened
from support.virtual_loop import run_virtually, settle


class ScriptedAttempt:
    """Says tokens 1, 2, 3 and so on when told to; unread ones come as one message."""

    def __init__(self, request: pb.DecodeRequest, on_news: Callable[[], object]) -> None:
        if request.request_id == "refused":
            raise Overloaded("no room", retry_after_s=1.5)
        if request.request_id == "bug":
            raise ZeroDivisionError
        self.request, self.on_news = request, on_news
        self.said = self.taken = 0
        self.over = self.closed = False
        self.failure: ServiceError | None = None

    def say(self, count: int) -> None:
        self.said += count
        self.on_news()

    def end(self) -> None:
        self.over = True
        self.on_news()

    def fail(self, failure: ServiceError) -> None:
        self.failure, self.over = failure, True
        self.on_news()

    def take(self) -> list[public_pb.GenerateResponse]:
        tokens = range(self.taken + 1, self.said + 1)
        self.taken = self.said
        return [public_pb.GenerateResponse(token_ids=tokens)] if tokens else []

    def close(self) -> None:
        self.closed = True


class Wire:
    """A connection to a worker here. `hold` keeps frames from the router."""

    def __init__(self) -> None:
        self.attempts: dict[str, ScriptedAttempt] = {}
        self.connection = RouterStream(self._begin)

    def _begin(self, request: pb.DecodeRequest, on_news: Callable[[], object]) -> Any:
        attempt = self.attempts[request.request_id] = ScriptedAttempt(request, on_news)
        return attempt


class GrpcWire(Wire):
    """A channel whose only call leads to the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.held = asyncio.Event()
        self.held.set()
        self.broken: grpc.aio.AioRpcError | None = None

    def link(self) -> DecodeStream:
        return GrpcDecodeStream(self, "d0", lambda: None)  # type: ignore[arg-type]

    def hold(self) -> None:
        self.held.clear()

    def release(self) -> None:
        self.held.set()

    def __getattr__(self, kind: str) -> Any:
        return lambda *_, **__: lambda *requests: _Call(self, requests[0]) if requests else None

    def stop(self) -> None:
        self.broken = grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "socket closed"
        )
        self.connection.end()


class FrameWire(Wire):
    """Two ends of a stream of frames."""

    to_router: MemoryTransport
    of_worker: FrameStream

    def __init__(self) -> None:
        super().__init__()
        self.held = asyncio.Event()
        self.held.set()

    def link(self) -> DecodeStream:
        return FrameDecodeStream("", b"key", "d0", lambda: None, lambda _: None, None, self._connect)

    async def _connect(self, address: str, opening: bytes, trust: object) -> FrameStream:
        def accept(stream: FrameStream, opening: bytes) -> None:
            self.of_worker = stream
            take = serve_router(self.connection, stream, self._at_once)
            stream.on_frame = lambda _, payload: take(payload)

        caller, self.to_router = opened(accept, opening)
        self.to_router.held = self.held
        return caller

    async def _at_once(self) -> None:
        pass

    def hold(self) -> None:
        self.held.clear()

    def release(self) -> None:
        self.held.set()

    def stop(self) -> None:
        self.to_router.abort()
        self.of_worker.connection_lost(None)


KINDS: tuple[type[Any], ...] = (GrpcWire, FrameWire)


@pytest.fixture(params=KINDS)
def wire(request: pytest.FixtureRequest) -> Any:
    return request.param()


class _Call:
    def __init__(self, wire: GrpcWire, requests: AsyncIterator[pb.RouterFrame]) -> None:
        self._wire = wire
        self._absorbing = asyncio.ensure_future(self._absorb(requests))

    async def _absorb(self, requests: AsyncIterator[pb.RouterFrame]) -> None:
        async for frame in requests:
            self._wire.connection.absorb(pb.RouterFrame.FromString(frame.SerializeToString()))

    async def __aiter__(self) -> AsyncIterator[pb.DecodeFrame]:
        async for frame in self._wire.connection.frames():
            await self._wire.held.wait()
            yield pb.DecodeFrame.FromString(frame.SerializeToString())
        if self._wire.broken is not None:
            raise self._wire.broken

    def cancel(self) -> None:
        self._absorbing.cancel()
        self._wire.connection.end()
        self._wire.connection.close()


class Reader:
    """Of one request; reads so many messages as it is allowed."""

    def __init__(self, link: DecodeStream, name: str, timeout_s: float = 100.0) -> None:
        self.tokens: list[int] = []
        self.num_messages = 0
        self.failure: ServiceError | None = None
        self.ended = False
        self.allowed = asyncio.Semaphore(0)
        self._stream = link.generate(pb.DecodeRequest(request_id=name), timeout_s)
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for message in self._stream:
                self.tokens += public_pb.GenerateResponse.FromString(message).token_ids
                self.num_messages += 1
                await self.allowed.acquire()
        except ServiceError as failure:
            self.failure = failure
        finally:
            await self._stream.aclose()
        self.ended = True

    def allow(self, count: int) -> None:
        for _ in range(count):
            self.allowed.release()


async def test_each_gets_its_own_and_no_other(wire: Any) -> None:
    link = wire.link()
    readers = {name: Reader(link, name) for name in ("a", "b")}
    await settle()
    wire.attempts["a"].say(2)
    wire.attempts["b"].say(3)
    for reader in readers.values():
        reader.allow(9)
    await settle()
    assert (readers["a"].tokens, readers["b"].tokens) == ([1, 2], [1, 2, 3])
    wire.attempts["a"].end()
    wire.attempts["b"].fail(InvalidRequest("sampling", "is wrong"))
    await settle()
    assert readers["a"].failure is None
    failure = readers["b"].failure
    assert isinstance(failure, InvalidRequest)
    assert failure.field == "sampling"
    assert all(attempt.closed for attempt in wire.attempts.values())
    assert link.idle
    link.break_off(Unavailable("over"))


async def test_refusals_and_mistakes_end_their_request_only(wire: Any) -> None:
    link = wire.link()
    refused, broken, good = (Reader(link, name) for name in ("refused", "bug", "good"))
    await settle()
    assert isinstance(refused.failure, Overloaded)
    assert refused.failure.retry_after_s == 1.5
    assert type(broken.failure) is ServiceError
    wire.attempts["good"].say(1)
    await settle()
    assert good.tokens == [1]
    link.break_off(Unavailable("over"))


async def test_one_that_nobody_reads_is_paused_and_comes_as_one_message(wire: Any) -> None:
    link = wire.link()
    slow, quick = Reader(link, "slow"), Reader(link, "quick")
    quick.allow(10_000)
    await settle()
    for _ in range(PAUSE_AT + 200):
        for attempt in wire.attempts.values():
            attempt.say(1)
        await settle()
    assert quick.num_messages == len(quick.tokens) == PAUSE_AT + 200
    assert wire.attempts["slow"].taken < PAUSE_AT + 10, "the rest waits at the worker"
    slow.allow(10_000)
    await settle()
    assert slow.tokens == quick.tokens
    assert slow.num_messages < PAUSE_AT + 15
    link.break_off(Unavailable("over"))


@pytest.mark.parametrize("how", ["over", "cancelled", "closed"])
async def test_one_that_is_over_is_freed_at_once(how: str) -> None:
    """And does not wait for a collection of cycles, which would be a pause for everybody."""
    there: list[weakref.ref[ScriptedAttempt]] = []

    def begin(request: pb.DecodeRequest, on_news: Callable[[], object]) -> Any:
        attempt = ScriptedAttempt(request, on_news)
        there.append(weakref.ref(attempt))
        if how == "over":
            attempt.end()
        return attempt

    connection = RouterStream(begin)
    gc.disable()
    try:
        connection.absorb(pb.RouterFrame(placed=[pb.PlacedRequest(number=1, timeout_ms=10_000)]))
        match how:
            case "over":
                assert (await anext(connection.frames())).parts[0].ended
            case "cancelled":
                connection.absorb(pb.RouterFrame(cancelled=[1]))
            case "closed":
                connection.close()
        assert [attempt() for attempt in there] == [None]
    finally:
        gc.enable()


async def test_a_deadline_ends_it_at_both_ends(wire: Any) -> None:
    reader = Reader(wire.link(), "late", timeout_s=0.0)
    await asyncio.sleep(0.01)
    assert isinstance(reader.failure, DeadlineExceeded)
    await settle()
    assert wire.attempts["late"].closed


async def test_a_frame_that_no_router_sends() -> None:
    connection = RouterStream(lambda request, on_news: ScriptedAttempt(request, on_news))  # type: ignore[arg-type, return-value]
    placed = pb.PlacedRequest(number=3, request=pb.DecodeRequest(request_id="a"))
    connection.absorb(pb.RouterFrame(placed=[placed], cancelled=[99], paused=[98], resumed=[97]))
    with pytest.raises(InvalidRequest, match=r"placed\.number"):
        connection.absorb(pb.RouterFrame(placed=[placed]))


moves = st.lists(
    st.tuples(
        st.sampled_from(["open", "say", "say", "say", "read", "read", "leave", "end", "fail", "hold", "release"]),
        st.integers(0, 5),
        st.integers(1, 90),
    ),
    max_size=60,
)


@pytest.mark.parametrize("kind", KINDS)
@given(schedule=moves, breaks=st.booleans(), seeds=st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_any_schedule(
    kind: type[Any], schedule: list[tuple[str, int, int]], breaks: bool, seeds: random.Random
) -> None:
    run_virtually(_any_schedule(kind, schedule, breaks, seeds))


async def _any_schedule(
    kind: type[Any], schedule: list[tuple[str, int, int]], breaks: bool, seeds: random.Random
) -> None:
    """Whoever reads on gets 1, 2, 3 ... of its own, all that was said; whoever left costs nothing at either end."""
    wire = kind()
    link = wire.link()
    readers: dict[str, Reader] = {}
    left: set[str] = set()
    for move, which, count in schedule:
        name = f"r{which}"
        attempt = wire.attempts.get(name)
        match move:
            case "open" if name not in readers:
                readers[name] = Reader(link, name)
            case "say" if attempt is not None and not attempt.over:
                attempt.say(count)
            case "end" if attempt is not None and not attempt.over:
                attempt.end()
            case "fail" if attempt is not None and not attempt.over:
                attempt.fail(Unavailable("gone"))
            case "read" if name in readers:
                readers[name].allow(count)
            case "leave" if name in readers and not readers[name].ended:
                left.add(name)
                readers[name].task.cancel()
            case "hold":
                wire.hold()
            case "release":
                wire.release()
        if seeds.random() < 0.7:
            await settle()
    wire.release()
    for reader in readers.values():
        reader.allow(10_000)
    await settle()
    for name, reader in readers.items():
        assert reader.tokens == list(range(1, len(reader.tokens) + 1)), "in order, each once"
        if name not in left:
            assert len(reader.tokens) == wire.attempts[name].said, "all of them"
            assert reader.ended == wire.attempts[name].over
    assert all(wire.attempts[name].closed for name in left & wire.attempts.keys()), "who left is ended there too"
    assert wire.connection.num_requests == sum(not attempt.closed for attempt in wire.attempts.values())
    if breaks:
        wire.stop()
    else:
        link.break_off(Unavailable("over"))
    await settle()
    for name, reader in readers.items():
        if name not in left:
            assert reader.ended
            assert (reader.failure is None) == (wire.attempts[name].over and wire.attempts[name].failure is None)
    assert link.idle
    assert link.broken
    assert all(attempt.closed for attempt in wire.attempts.values())
