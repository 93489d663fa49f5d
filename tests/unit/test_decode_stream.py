"""Router and decode worker at the two ends of their stream, in memory: what any schedule of requests may do to it.

Both ends are the real ones; between them are queues instead of TCP. Attempts are scripted.
"""

import asyncio
import functools
import gc
import random
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from google.rpc import status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import DeadlineExceeded, InvalidRequest, Overloaded, ServiceError, Unavailable
from cluster.network.error_status import from_proto
from cluster.network.mux import MAX_MESSAGE_BYTES, Channel, Mux
from cluster.network.mux_stream import MuxStream
from protos import decode_pb2 as pb
from protos import inference_pb2 as public_pb
from router.decode_client.decode_streams import PAUSE_AT, DecodeStream
from support.frame_pair import MemoryTransport, join
from support.virtual_loop import run_virtually, settle
from worker.requests.service import serve_request


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

    of_worker: MuxStream
    to_router: MemoryTransport

    def __init__(self) -> None:
        self.attempts: dict[str, ScriptedAttempt] = {}
        self._is_held = False

    def _begin(self, request: pb.DecodeRequest, on_news: Callable[[], object]) -> Any:
        attempt = self.attempts[request.request_id] = ScriptedAttempt(request, on_news)
        return attempt

    def link(self) -> DecodeStream:
        return DecodeStream("", b"key", "d0", lambda: None, lambda _: None, None, self._connect)

    async def _connect(self, stream: MuxStream, address: str, trust: object) -> None:
        self.of_worker, _, self.to_router = join(stream, self._accept)
        if self._is_held:
            self.hold()

    def _accept(self, stream: MuxStream, opening: bytes) -> None:
        stream.on_channel = functools.partial(serve_request, self._begin)

    def hold(self) -> None:
        self._is_held = True
        if hasattr(self, "to_router"):
            self.to_router.held.clear()

    def release(self) -> None:
        self._is_held = False
        if hasattr(self, "to_router"):
            self.to_router.held.set()

    def stop(self) -> None:
        self.to_router.abort()
        self.of_worker.connection_lost(None)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
async def link(wire: Wire) -> AsyncIterator[DecodeStream]:
    made = wire.link()
    yield made
    made.break_off(Unavailable("over"))


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
            async for messages in self._stream:
                for message in messages:
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


async def test_each_gets_its_own_and_no_other(wire: Wire, link: DecodeStream) -> None:
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
    assert (type(failure), failure.field) == (InvalidRequest, "sampling")
    assert all(attempt.closed for attempt in wire.attempts.values())
    assert link.idle


async def test_refusals_and_mistakes_end_their_request_only(wire: Wire, link: DecodeStream) -> None:
    refused, broken, good = (Reader(link, name) for name in ("refused", "bug", "good"))
    await settle()
    assert (type(refused.failure), refused.failure.retry_after_s) == (Overloaded, 1.5)
    assert type(broken.failure) is ServiceError
    wire.attempts["good"].say(1)
    await settle()
    assert good.tokens == [1]


async def test_one_that_nobody_reads_is_paused_and_comes_as_one_message(wire: Wire, link: DecodeStream) -> None:
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


@pytest.mark.parametrize("how", ["over", "refused", "cancelled", "closed"])
async def test_one_that_is_over_is_freed_at_once(how: str) -> None:
    """And does not wait for a collection of cycles, which would be a pause for everybody."""
    there: list[weakref.ref[ScriptedAttempt]] = []

    def begin(request: pb.DecodeRequest, on_news: Callable[[], object]) -> Any:
        attempt = ScriptedAttempt(request, on_news)
        there.append(weakref.ref(attempt))
        if how == "over":
            attempt.end()
        return attempt

    gc.disable()
    try:
        caller, router = (
            Mux(b"", _unexpected, lambda: None),
            Mux(None, functools.partial(serve_request, begin), lambda: None),
        )
        opening = pb.DecodeRequest(request_id=how, timeout_ms=10_000).SerializeToString()
        channel = caller.open(opening)
        ends: list[bytes] = []
        channel.on_end = ends.append
        carry(caller, router)
        match how:
            case "over" | "refused":
                carry(router, caller)
                assert len(ends) == 1
            case "cancelled":
                channel.cancel()
                carry(caller, router)
            case "closed":
                router.end()
        assert [attempt() for attempt in there] == ([] if how == "refused" else [None])
        assert router.num_channels == 0
    finally:
        gc.enable()


def _unexpected(channel: Channel, opening: bytes) -> None:
    raise AssertionError


def carry(one: Mux, other: Mux) -> None:
    """Take what one side has to the other."""
    while raw := one.take():
        other.receive(raw)


async def test_a_deadline_ends_it_at_both_ends(wire: Wire) -> None:
    reader = Reader(wire.link(), "late", timeout_s=0.0)
    await asyncio.sleep(0.01)
    assert isinstance(reader.failure, DeadlineExceeded)
    await settle()
    assert wire.attempts["late"].closed


async def test_what_is_no_request_and_mistakes_in_the_middle_end_their_request_only(
    wire: Wire, link: DecodeStream
) -> None:
    good, broken = Reader(link, "good"), Reader(link, "broken")
    await settle()
    ends: list[bytes] = []
    link.stream.mux.open(b"\xff").on_end = ends.append
    wire.attempts["broken"].take = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    wire.attempts["broken"].on_news()
    await settle()
    refusal = from_proto(status_pb2.Status.FromString(ends[0]))
    assert (type(refusal), refusal.field) == (InvalidRequest, "request")
    assert type(broken.failure) is ServiceError
    assert wire.attempts["broken"].closed
    wire.attempts["good"].say(1)
    await settle()
    assert good.tokens == [1]


async def test_a_request_that_no_frame_can_carry_is_refused(wire: Wire, link: DecodeStream) -> None:
    huge = pb.DecodeRequest(cache_salt="x" * MAX_MESSAGE_BYTES)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_MESSAGE_BYTES}"):
        await anext(link.generate(huge, 1.0))
    largest = pb.DecodeRequest(request_id="largest", cache_salt="x" * (MAX_MESSAGE_BYTES - 40))
    reading = asyncio.ensure_future(anext(link.generate(largest, 1.0)))
    others = [Reader(link, name) for name in ("a", "b")]
    await settle()
    for attempt in wire.attempts.values():
        attempt.say(1)
    await settle()
    (message,) = await reading
    assert public_pb.GenerateResponse.FromString(message).token_ids == [1]
    assert [other.tokens for other in others] == [[1], [1]]


moves = st.lists(
    st.tuples(
        st.sampled_from(["open", "say", "say", "say", "read", "read", "leave", "end", "fail", "hold", "release"]),
        st.integers(0, 5),
        st.integers(1, 90),
    ),
    max_size=60,
)


@given(schedule=moves, breaks=st.booleans(), seeds=st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_any_schedule(schedule: list[tuple[str, int, int]], breaks: bool, seeds: random.Random) -> None:
    run_virtually(_any_schedule(schedule, breaks, seeds))


async def _any_schedule(schedule: list[tuple[str, int, int]], breaks: bool, seeds: random.Random) -> None:
    """Whoever reads on gets 1, 2, 3 ... of its own, all that was said; whoever left costs nothing at either end."""
    wire = Wire()
    link = wire.link()
    await settle()
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
    assert wire.of_worker.mux.num_accepted == sum(not attempt.closed for attempt in wire.attempts.values())
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
