"""A worker's side of Membership: one stream to every router, for as long as the worker lives.

The worker's end of routers' connections: requests and tokens, and the worker's events.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

import grpc

from cluster.discovery.discovery import Discovery, Roster
from cluster.errors import AlreadyExists, Incompatible, ServiceError, TandemError, Unavailable
from cluster.network.error_status import from_rpc_error
from cluster.network.mux import Channel, ProtocolError
from cluster.network.mux_stream import MuxStream
from cluster.network.rpc import channel
from cluster.network.tls import TlsIdentity
from cluster.process.tasks import Tasks, happens
from engine.messages.from_engine import CacheChanged, LoadReport
from engine.messages.to_engine import TakeSnapshot
from engine.process.front.engine_client import EngineClient
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc
from protos.loans_pb2 import Holder
from worker.front.worker_events import cache_events, load_report, messages_of, parts_of, summary

log = logging.getLogger(__name__)


OPENED_S = 3.5
"""Seconds that a router has to connect after its Welcome; it gives up after 3."""
Serve = Callable[[Channel, bytes], object]
"""Function that serves a request of a router: a channel, and its opening."""


class RouterStreams:
    """Connections of all routers, by the key of the membership whose events they bring."""

    def __init__(self) -> None:
        self.serve: Serve | None = None
        """Server of requests; None while the worker starts."""
        self._opened: dict[bytes, MuxStream] = {}
        self._awaited: dict[bytes, asyncio.Future[MuxStream]] = {}

    def accept(self, stream: MuxStream, opening: bytes) -> None:
        """Take a connection that a router has opened."""
        key = pb.StreamOpening.FromString(opening).key
        if self.serve is None:
            raise Unavailable("this worker is starting")
        stream.on_channel, stream.mux.on_note = self.serve, _unexpected
        if not key:
            return
        self._opened[key] = stream
        stream.on_end.append(lambda _: self._opened.pop(key, None))
        if (awaited := self._awaited.get(key)) is not None and not awaited.done():
            awaited.set_result(stream)

    async def of(self, key: bytes) -> MuxStream:
        """Return the connection with this key.

        Raises Unavailable where the router does not open it.
        """
        if (stream := self._opened.get(key)) is not None:
            return stream
        awaited: asyncio.Future[MuxStream] = asyncio.get_running_loop().create_future()
        self._awaited[key] = awaited
        try:
            async with asyncio.timeout(OPENED_S):
                return await awaited
        except TimeoutError:
            raise Unavailable(f"the router did not connect to stream_port within {OPENED_S:g} s") from None
        finally:
            del self._awaited[key]


def _unexpected(note: bytes) -> None:
    raise ProtocolError("a router sends no notes")


Meet = Callable[[Sequence[Holder]], Awaitable[None]]

RETRY_S = 0.2
REFUSED_RETRY_S = 5.0
"""Seconds until the next attempt after a router found by discovery refused this worker, or this worker it."""
NAME_TAKEN_S = 10.0
"""Seconds that a worker waits for a predecessor of its name to leave."""
WARN_AFTER_S, WARN_EVERY_S = 5.0, 60.0
"""Seconds until the first and between further warnings about a router that cannot be reached."""
TOGETHER_S = 0.02
"""Seconds for which events are collected into one message to a router."""
MAX_BACKLOG = 4096
"""Messages by which a router may lag; then its stream is dropped, and the next one begins with a snapshot."""


@dataclass(slots=True)
class _Router:
    """One router, by its address."""

    address: str
    backlog: "asyncio.Queue[CacheChanged | LoadReport | None]" = field(
        default_factory=lambda: asyncio.Queue(MAX_BACKLOG)
    )
    """Messages to send; None wakes the sender at the end of the connection."""
    task: "asyncio.Task[None] | None" = None
    router_id: str = ""
    """Id of the router; empty while there is no stream to it."""
    urgent: asyncio.Event = field(default_factory=asyncio.Event)
    """Signal that the backlog should be sent at once."""
    hello: pb.Hello | None = None
    """The Hello that was sent last."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Signal that the stream should end and another one begin."""
    refusal: ServiceError | None = None
    """Error with which it refuses this worker for good; None: it has this worker, or may take it later."""
    said: str = ""
    """Last logged reason why there is no stream; empty while there is one."""
    apart_since: float = field(default_factory=time.monotonic)
    warned_at: float = -math.inf


class Memberships:
    """All membership streams of a worker.

    Routers named in the settings are tried for ever, routers found by discovery come and go. The worker goes on while
    one router has it or may take it yet: no single router can end it.
    """

    def __init__(
        self,
        hello: pb.Hello,
        engine: EngineClient,
        pinned: Collection[str],
        discovery: Discovery,
        draining: Callable[[], bool],
        streams: RouterStreams,
        name_taken_s: float = NAME_TAKEN_S,
        trust: TlsIdentity | None = None,
        meet: Meet | None = None,
        files: Callable[[], AsyncIterator[pb.ModelFilePart]] | None = None,
    ) -> None:
        """Create them; `meet` connects to workers that a router names, before it gets the first report.

        `streams` are the connections that routers open at the Hello's `stream_address`. `files` yields the files of the
        model for a router that has other ones.
        """
        self._streams = streams
        self._files = files
        self._hello = hello
        self._engine = engine
        self._pinned = frozenset(pinned)
        self._discovery = discovery
        self._draining = draining
        self._name_taken_s = name_taken_s
        self._trust = trust
        self._meet = meet
        self._roster = Roster(pinned)
        self._routers: dict[str, _Router] = {}
        self._last_load: LoadReport | None = None
        self._failed: asyncio.Future[TandemError]
        self._tasks = Tasks(self._cannot_go_on)

    def start(self) -> None:
        self._failed = asyncio.get_running_loop().create_future()
        self._follow()
        self._tasks.spawn(self._listen())

    async def failed(self) -> TandemError:
        """Return an error with which this worker cannot go on, such as when every router refuses it for good."""
        return await asyncio.shield(self._failed)

    @property
    def num_joined(self) -> int:
        """Number of routers with an open stream."""
        return len(self._joined())

    def report_draining(self) -> None:
        """Report the drain at once, not with the engine's next report."""
        self._hurry()

    def _hurry(self) -> None:
        for router in self._routers.values():
            if self._last_load is not None and not router.backlog.full():
                router.backlog.put_nowait(self._last_load)
                router.urgent.set()

    async def rejoin(self, role: "pb.Role.ValueType", timeout_s: float) -> None:
        """End every stream and join again with `role`.

        Returns when every router that had this worker knows the new role, or after `timeout_s`.
        """
        hello = pb.Hello()
        hello.CopyFrom(self._hello)
        hello.role = role
        self._hello = hello  # a new object: its identity shows which routers have received it
        known = [router for router in self._routers.values() if router.router_id]
        for router in known:
            router.over.set()
        self._hurry()
        give_up_at = time.monotonic() + timeout_s
        while any(router.hello is not self._hello or not router.router_id for router in known):
            if time.monotonic() > give_up_at:
                log.warning("some routers do not know this worker as %s yet", pb.Role.Name(role))
                return
            await asyncio.sleep(RETRY_S / 10)

    async def leave(self) -> None:
        """End every stream, so that routers forget this worker."""
        await self._tasks.close()

    # ------------------------------------------------------------------ who to be joined to

    async def _listen(self) -> None:
        async for addresses in self._discovery.listings():
            self._roster.listed(addresses, self._joined())
            self._follow()

    def _joined(self) -> list[str]:
        return [router.address for router in self._routers.values() if router.router_id]

    def _follow(self) -> None:
        for address in self._roster.wanted.difference(self._routers):
            router = self._routers[address] = _Router(address)
            router.task = self._tasks.spawn(self._stay_joined(router))
        for address in set(self._routers).difference(self._roster.wanted):
            log.warning("router %s has left and is not tried any more", address)
            task = self._routers.pop(address).task
            assert task is not None
            task.cancel()

    def _cannot_go_on(self, error: BaseException) -> None:
        """Fail, also when discovery stops: a worker that cannot find routers must not continue silently."""
        if not self._failed.done():
            self._failed.set_exception(error)

    # ------------------------------------------------------------------ one of them

    async def _stay_joined(self, router: _Router) -> None:
        """Keep joining a router, until every router refuses this worker for good."""
        name_taken_at: float | None = None
        while True:
            async with channel(router.address, self._trust) as link:  # a new channel may have new certificates
                wait_s, failure = RETRY_S, await self._join_once(pb_grpc.MembershipStub(link), router)
            name_taken_at = (name_taken_at or time.monotonic()) if isinstance(failure, AlreadyExists) else None
            is_taken = name_taken_at is not None and time.monotonic() - name_taken_at > self._name_taken_s
            if isinstance(failure, Incompatible):
                wait_s = REFUSED_RETRY_S
            # A router found by discovery may be one of another version, which a rollout replaces.
            is_for_good = is_taken or (isinstance(failure, Incompatible) and router.address in self._pinned)
            router.refusal = failure if is_for_good else None
            if all(other.refusal is not None for other in self._routers.values()):
                if not self._failed.done():
                    self._failed.set_result(failure)
                return
            self._log(router, failure)
            await asyncio.sleep(wait_s)

    def _log(self, router: _Router, failure: ServiceError) -> None:
        """Log a refusal at once, an unreachable router (it may be starting) after a while and then every minute."""
        now, reason = time.monotonic(), str(failure)
        if isinstance(failure, AlreadyExists | Incompatible):
            if reason != router.said:
                log.error("router %s could not be joined: %s", router.address, reason)
        elif now - router.apart_since >= WARN_AFTER_S and now - router.warned_at >= WARN_EVERY_S:
            log.warning(
                "router %s could not be joined for %.0f s: %s", router.address, now - router.apart_since, reason
            )
            router.warned_at = now
        elif reason != router.said:
            log.info("router %s could not be joined: %s", router.address, reason)
        router.said = reason

    async def _join_once(self, stub: pb_grpc.MembershipStub, router: _Router) -> ServiceError:
        """Join once; return the error that ended the stream."""
        try:
            await self._join(stub, router)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        except ServiceError as error:
            return error
        finally:
            if router.router_id:
                router.router_id, router.apart_since, router.warned_at = "", time.monotonic(), -math.inf
        return ServiceError("the stream ended")

    async def _join(self, stub: pb_grpc.MembershipStub, router: _Router) -> None:
        backlog = router.backlog = asyncio.Queue(MAX_BACKLOG)
        over = router.over = asyncio.Event()
        answered, hello = asyncio.Event(), self._hello
        files_wanted = False
        router.hello = hello
        failure: ServiceError | None = None
        tasks = Tasks("the engine's events are sent to a router no more")

        def watch(message: CacheChanged | LoadReport) -> None:
            if isinstance(message, LoadReport):
                self._last_load = message
            try:
                backlog.put_nowait(message)
            except asyncio.QueueFull:
                over.set()

        async def outgoing() -> AsyncIterator[pb.WorkerMessage]:
            yield pb.WorkerMessage(hello=hello)
            await answered.wait()
            if files_wanted and self._files is not None:
                async for part in self._files():
                    yield pb.WorkerMessage(file=part)
            await over.wait()

        async def report(key: bytes) -> None:
            nonlocal failure
            try:
                await self._report(router, await self._streams.of(key))
            except ServiceError as error:
                failure = error
            finally:
                over.set()

        with self._engine.watching(watch):
            call = stub.Join(outgoing())
            try:
                async for answer in call:
                    if answer.HasField("files_wanted"):
                        log.info("router %s asks for the files of the model", router.address)
                        files_wanted = True
                        answered.set()
                    elif answer.HasField("welcome"):
                        answered.set()
                        if self._meet is not None:
                            await self._meet(answer.welcome.peers)
                        self._welcome(router, answer.welcome)
                        tasks.spawn(report(answer.welcome.stream_key))
                    elif answer.HasField("resync"):
                        self._engine.send(TakeSnapshot())
            finally:
                call.cancel()
                over.set()  # whichever side ended it: `outgoing` would wait for ever
                answered.set()
                await tasks.close()
        if failure is not None:
            raise failure

    async def _report(self, router: _Router, stream: MuxStream) -> None:
        """Send a router the events over its connection, until the membership is over.

        Raises Unavailable when the connection ends before.
        """
        backlog, over = router.backlog, router.over

        def end(_: ServiceError) -> None:
            over.set()
            with suppress(asyncio.QueueFull):
                backlog.put_nowait(None)

        stream.on_end.append(end)
        self._engine.send(TakeSnapshot())
        synchronised, spoke_at = False, 0.0
        while stream.ended is None and not over.is_set():  # an engine sends messages several times a second
            news = [await backlog.get()]
            await happens(router.urgent, spoke_at + TOGETHER_S - time.monotonic())
            router.urgent.clear()
            while not backlog.empty():
                news.append(backlog.get_nowait())
            spoke_at = time.monotonic()
            load: pb.LoadReport | None = None
            caches: list[pb.CacheEvents] = []
            for event in summary([event for event in news if event is not None]):
                if isinstance(event, LoadReport):
                    load = load_report(event, self._draining())
                elif synchronised or event.snapshot:
                    synchronised = True
                    caches.append(cache_events(event))
            for message in messages_of(chain.from_iterable(map(parts_of, caches)), load):
                stream.mux.note(message.SerializeToString())
                await stream.drained()
        if stream.ended is not None:
            raise Unavailable(f"the router's connection to stream_port ended: {stream.ended.message}")

    def _welcome(self, router: _Router, welcome: pb.Welcome) -> None:
        """Check a router's identity.

        Raises Incompatible when another router has the same id.

        The same router at another address counts too: placements of each would be taken for the other's.
        """
        for other in self._routers.values():
            if other is not router and other.router_id == welcome.router_id:
                raise Incompatible(
                    f"{other.address} and {router.address} both have the id {welcome.router_id!r}; "
                    "each router needs its own router_id, and one address",
                    "router_id",
                )
        router.router_id, router.said, router.refusal = welcome.router_id, "", None
        log.info("joined to router %s at %s", welcome.router_id, router.address)
