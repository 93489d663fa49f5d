"""Subscription to the KV events of one stock server, over ZMQ."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from protos import membership_pb2 as pb
from router.stock.kv_events import BatchOrder, KvEventBatch, NamedBlocks, read_batch

log = logging.getLogger(__name__)

REPLAY_S = 2.0
"""Seconds for each replayed batch."""
END = (-1).to_bytes(8, "big", signed=True)
"""Number after the last replayed batch."""

OnChange = Callable[[Sequence[pb.CacheEvent], bool], object]
"""Function that gets changes of the cache, and whether they replace all before."""


class EventFeed:
    """Events of one server, applied in order; what was lost is asked again, or forgotten."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        name: str,
        publisher: str,
        replay: str | None,
        blocks: NamedBlocks,
        on_come: Callable[[], object],
        on_change: OnChange,
    ) -> None:
        """Create it; `publisher` and `replay` are ZMQ endpoints, `name` is the server's in logs.

        `on_come` is called before the first change: from then on events can be relied on.
        """
        self._context = context
        self._name = name
        self._publisher, self._replay = publisher, replay
        self._blocks = blocks
        self._on_come: Callable[[], object] | None = on_come
        self._on_change = on_change
        self._order = BatchOrder()

    async def run(self) -> None:
        """Follow the server until it is cancelled."""
        with self._context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(self._publisher)
            await self._replayed(0)
            while True:
                await self._published(await socket.recv_multipart())

    async def _published(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3:
            log.warning("server %s publishes a KV event of %d frames instead of 3", self._name, len(frames))
            return
        self._come()
        number = int.from_bytes(frames[1], "big")
        verdict = self._order.judge(number)
        if verdict == "known":
            return
        if verdict == "next":
            self._apply(number, frames[2])
            return
        first = self._order.next or 0
        if verdict == "restart":
            self._blocks.restarted()
            self._order.next = None
            self._on_change(self._blocks.snapshot(), True)
            first = 0
        else:
            log.info("server %s: KV events %d to %d are missing", self._name, first, number - 1)
        await self._replayed(first)
        if self._order.next is None or self._order.next <= number:  # not to be had, or not all
            self._forget()
            self._apply(number, frames[2])

    def _come(self) -> None:
        if self._on_come is not None:
            on_come, self._on_come = self._on_come, None
            on_come()

    def _forget(self) -> None:
        self._blocks.forget_held()
        self._on_change(self._blocks.snapshot(), True)

    async def _replayed(self, first: int) -> None:
        """Ask for all batches from `first` on and apply those that come."""
        if self._replay is None:
            return
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay)
            try:
                async with asyncio.timeout(REPLAY_S):
                    await socket.send_multipart([b"", first.to_bytes(8, "big")])
                expected = first
                while True:
                    async with asyncio.timeout(REPLAY_S):
                        _, _, encoded, payload = await socket.recv_multipart()
                    self._come()
                    if encoded == END:
                        return
                    number = int.from_bytes(encoded, "big")
                    if number != expected:
                        self._forget()  # its buffer begins later
                    self._apply(number, payload)
                    expected = number + 1
            except TimeoutError:
                return

    def _apply(self, number: int, payload: bytes) -> None:
        try:
            batch: KvEventBatch = read_batch(payload)
            changes = self._blocks.apply(batch)
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            log.warning("server %s publishes KV events that cannot be read: %r", self._name, error)
            self._forget()
        else:
            if changes is None:
                self._on_change(self._blocks.snapshot(), True)
            elif changes:
                self._on_change(changes, False)
        self._order.applied(number)
