"""Load driver: sends requests when they are due, and records the times of their tokens."""

import asyncio
import contextlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from cluster.errors import Overloaded, ServiceError, TandemError
from protos import inference_pb2 as pb
from tandem.loadgen.frontends import Frontend
from workloads.request import EndState, Outcome, TraceRequest
from workloads.results import LatencyHistogram

SLEEP_AT_LEAST_S = 0.001
"""Shortest sleep in seconds; requests due sooner are sent now."""


@dataclass(slots=True, eq=False)
class SentRequest:
    """One request; times are seconds of the event loop's clock."""

    number: int
    """Number among all sent requests, from 0."""
    counted: bool
    """Whether it counts; False during the warm-up."""
    outcome: Outcome
    finish: pb.Finish = field(default_factory=pb.Finish)


@dataclass(slots=True)
class SentLoad:
    """Measurements of a whole run."""

    gaps: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Inter-token latencies. Tokens that arrived together share the time since those before."""
    count: int = 0
    """Number of requests."""
    last_due_at: float = 0.0
    late_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Lateness of each request in an open loop, in seconds."""
    most_under_way: int = 0


class LoadDriver:
    """One run against one frontend."""

    def __init__(self, frontend: Frontend, on_end: Callable[[SentRequest], object], warmup_s: float = 0.0) -> None:
        """Create it.

        `on_end` is called once for each sent request, at its end.

        Requests due before `warmup_s` are in none of the figures.
        """
        self._frontend = frontend
        self._on_end = on_end
        self._warmup_s = warmup_s
        self._counts_from = 0.0
        self._ignored = LatencyHistogram()
        self._num_sent = 0
        self.num_under_way = 0
        self.sent = SentLoad()

    async def open_loop(self, requests: Iterable[TraceRequest], begins_at: float) -> None:
        """Send each request at its time after `begins_at`, of the event loop's clock; return when all have ended.

        Cancelled, it cancels those in flight, which then do not count. Raises errors of `requests`.
        """
        loop = asyncio.get_running_loop()
        self._counts_from = begins_at + self._warmup_s
        with _unwrapped():
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    due_at = begins_at + request.arrival_s
                    ahead_s = due_at - loop.time()
                    # a late driver still lets answers in
                    await asyncio.sleep(ahead_s if ahead_s > SLEEP_AT_LEAST_S else 0)
                    if due_at >= self._counts_from:
                        self.sent.late_s.append(max(0.0, loop.time() - due_at))
                    self._start(group, request, due_at)

    async def closed_loop(self, requests: Iterable[TraceRequest], concurrency: int, until: float = math.inf) -> None:
        """Keep `concurrency` requests in flight, none started after `until`; their own times are ignored."""
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(concurrency)
        self._counts_from = loop.time() + self._warmup_s
        with _unwrapped():
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    await room.acquire()
                    if loop.time() >= until:
                        break
                    self._start(group, request, loop.time()).add_done_callback(lambda _: room.release())

    def _start(self, group: asyncio.TaskGroup, request: TraceRequest, sent_at: float) -> "asyncio.Task[None]":
        self.num_under_way += 1
        sent, counted = self.sent, sent_at >= self._counts_from
        sent.most_under_way = max(sent.most_under_way, self.num_under_way)
        if counted:
            sent.count += 1
            sent.last_due_at = sent_at
        sent_request = SentRequest(self._num_sent, counted, Outcome(request, sent_at, num_attempts=1))
        self._num_sent += 1
        return group.create_task(self._ask(sent_request, sent.gaps if counted else self._ignored))

    async def _ask(self, sent_request: SentRequest, gaps: LatencyHistogram) -> None:
        outcome, time = sent_request.outcome, asyncio.get_running_loop().time

        def on_tokens(count: int) -> None:
            now = time()
            if outcome.num_emitted:
                gaps.add((now - outcome.last_token_at) / count, count)
            else:
                outcome.first_token_at = now
                if count > 1:
                    gaps.add(0.0, count - 1)
            outcome.num_emitted += count
            outcome.last_token_at = now

        try:
            sent_request.finish = await self._frontend.ask(outcome.request, on_tokens)
        except Overloaded as error:
            outcome.end_state, outcome.reason = EndState.REFUSED, _short(error)
        except ServiceError as error:
            outcome.end_state, outcome.reason = EndState.FAILED, _short(error)
        else:
            _read(outcome, sent_request.finish)
        finally:
            self.num_under_way -= 1
        self._on_end(sent_request)


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise errors of the requests' source without the group that a TaskGroup wraps them in."""
    try:
        yield
    except ExceptionGroup as group:
        theirs, others = group.split(TandemError)
        if theirs is None or others is not None:
            raise
        raise theirs.exceptions[0] from None


def _read(outcome: Outcome, finish: pb.Finish) -> None:
    """Record the server's usage and receipt."""
    if not outcome.num_emitted:
        outcome.end_state, outcome.reason = EndState.FAILED, "a stream without a token"
        return
    outcome.end_state = EndState.FINISHED
    outcome.reused_tokens = finish.usage.cached_tokens
    outcome.moved_bytes = finish.receipt.kv.moved_bytes
    placement = finish.receipt.placement
    outcome.num_attempts = max(1, placement.attempt)
    outcome.predicted_ttft_s = placement.predicted_ttft_ms / 1e3


def _short(error: ServiceError) -> str:
    """Return an error without numbers, to be counted by."""
    words = " ".join("N" if any(letter.isdigit() for letter in word) else word for word in str(error).split())
    return f"{type(error).__name__}: {words}"[:120]
