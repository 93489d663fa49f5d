"""KV events of stock vLLM servers, as changes of the router's own index.

Pure. vLLM names a block by a hash of its own; the router names it by the tokens of its chain (kvcache/block_keys.py).
An event of a stored block has its tokens and the name of its parent, so that each name is found from the one before.

    batch n ──n + 1──▶ applied
            ──later──▶ gap: batches are missing ──replayed──▶ applied in order
                                                └─not to be had──▶ all held blocks are forgotten; their names stay known
            ──0, or earlier──▶ the server restarted: held blocks and names are forgotten

Subscription to the KV events of one stock server, over ZMQ.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio

from kvcache.block_keys import BlockKey, block_keys
from protos import membership_pb2 as pb

log = logging.getLogger(__name__)


FULL_ATTENTION = "full_attention"
Hash = bytes | int
RootOf = Callable[[str, str], BlockKey | None]
"""Parent of the first block of a chain, by cache salt and name of the LoRA adapter; None for an unknown adapter."""


class KvEventBatch(msgspec.Struct, array_like=True):
    """Batch of events, as vLLM packs it."""

    ts: float
    events: list[dict[str, Any] | list[Any]]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(KvEventBatch)


def read_batch(payload: bytes) -> KvEventBatch:
    """Parse a batch. Raises msgspec.MsgspecError."""
    return _decoder.decode(payload)


class NamedBlocks:
    """Blocks that one server holds, by vLLM's hashes and by the router's keys."""

    def __init__(self, root_of: RootOf, block_tokens: int, max_names: int) -> None:
        """Create it; `max_names` bounds the hashes that are remembered, held blocks included."""
        self._root_of = root_of
        self._block_tokens = block_tokens
        self._max_names = max_names
        self.key_of: dict[Hash, BlockKey] = {}
        """Keys of all blocks of which the chain is known, held or not."""
        self._held: set[Hash] = set()
        self._held_keys: set[BlockKey] = set()
        self._expected: dict[BlockKey, int] = {}
        """Number of requests there whose prompt has the block: the first of them leaves it, and others find it."""

    @property
    def num_held(self) -> int:
        return len(self._held)

    def forget_held(self) -> None:
        """Forget which blocks are held; a block that is stored later may still follow one of them."""
        self._held.clear()
        self._held_keys.clear()

    def restarted(self) -> None:
        """Forget all: another process begins with an empty cache."""
        self.forget_held()
        self.key_of.clear()

    def sent(self, keys: Sequence[BlockKey]) -> list[pb.CacheEvent]:
        """Return the changes of a request with these blocks; vLLM shares them from the step that computes them on."""
        fresh = [key for key in keys if key not in self._held_keys and key not in self._expected]
        for key in keys:
            self._expected[key] = self._expected.get(key, 0) + 1
        return [pb.CacheEvent(stored=b"".join(fresh))] if fresh else []

    def ended(self, keys: Sequence[BlockKey]) -> list[pb.CacheEvent]:
        """Return the changes of the end of such a request: what the server did not tell of is not there."""
        gone = []
        for key in keys:
            if (left := self._expected.pop(key) - 1) > 0:
                self._expected[key] = left
            elif key not in self._held_keys:
                gone.append(key)
        return [pb.CacheEvent(removed=b"".join(gone))] if gone else []

    def apply(self, batch: KvEventBatch) -> list[pb.CacheEvent] | None:
        """Return a batch's changes of the index; None: the cache was cleared, and what follows is in `snapshot`."""
        changes: list[pb.CacheEvent] = []
        was_cleared = False
        for event in batch.events:
            fields = event if isinstance(event, dict) else {"type": event[0]}
            kind = fields.get("type")
            if kind == "BlockStored":
                changes += self._stored(fields)
            elif kind == "BlockRemoved":
                changes += self._removed(fields)
            elif kind == "AllBlocksCleared":
                was_cleared = True
                self.forget_held()
                changes.clear()
        return None if was_cleared else changes

    def snapshot(self) -> list[pb.CacheEvent]:
        """Return all blocks that are held or expected as one change."""
        joined = b"".join(self._held_keys | self._expected.keys())
        return [pb.CacheEvent(stored=joined)] if joined else []

    def _stored(self, event: dict[str, Any]) -> Iterable[pb.CacheEvent]:
        # Of a model with several KV groups, blocks of full attention say how far a prompt is cached.
        if event.get("kv_cache_spec_kind") not in (None, FULL_ATTENTION) or event.get("medium") not in (None, "GPU"):
            return ()
        hashes: Sequence[Hash] = event["block_hashes"]
        tokens: Sequence[int] = event["token_ids"]
        width = event["block_size"]
        if width != self._block_tokens or len(tokens) != width * len(hashes):
            return ()
        parent = self._parent_of(event)
        if parent is None or not _is_text(event):
            return ()
        keys = block_keys(parent, tokens, width)
        fresh = []
        for name, key in zip(hashes, keys, strict=True):
            self.key_of.pop(name, None)  # the newest last: the oldest names are dropped first
            self.key_of[name] = key
            if name not in self._held:
                self._held.add(name)
                if key not in self._held_keys and key not in self._expected:
                    fresh.append(key)
                self._held_keys.add(key)
        self._bound_names()
        return (pb.CacheEvent(parent=parent, stored=b"".join(fresh)),) if fresh else ()

    def _parent_of(self, event: dict[str, Any]) -> BlockKey | None:
        if (parent := event.get("parent_block_hash")) is not None:
            return self.key_of.get(parent)
        adapter = event.get("lora_name") or ""
        first = (event.get("extra_keys") or [None])[0] or ()
        salts = [each for each in first if isinstance(each, str) and each != adapter]
        return self._root_of(salts[0] if salts else "", adapter)

    def _removed(self, event: dict[str, Any]) -> Iterable[pb.CacheEvent]:
        if event.get("medium") not in (None, "GPU"):
            return ()
        gone = [name for name in event["block_hashes"] if name in self._held]
        self._held.difference_update(gone)
        keys = {self.key_of[name] for name in gone}
        self._held_keys -= keys
        joined = b"".join(keys - self._expected.keys())
        return (pb.CacheEvent(removed=joined),) if joined else ()

    def _bound_names(self) -> None:
        """Drop the oldest names of blocks that are not held."""
        if len(self.key_of) <= self._max_names:
            return
        for name in [name for name in self.key_of if name not in self._held]:
            del self.key_of[name]
            if len(self.key_of) <= self._max_names // 2:
                return


def _is_text(event: dict[str, Any]) -> bool:
    """Return whether no block of the event holds pictures or the like, which have other names here."""
    extra = event.get("extra_keys") or ()
    return not any(isinstance(each, list | tuple) for keys in extra if keys for each in keys)


class AssumedBlocks:
    """Blocks that a server without KV events is assumed to hold: those of the most recent requests there."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._keys: dict[BlockKey, None] = {}

    def sent(self, keys: Sequence[BlockKey]) -> list[pb.CacheEvent]:
        """Return the changes of a request with these blocks."""
        fresh = [key for key in keys if key not in self._keys]
        for key in reversed(keys):  # a block is dropped before those that it continues
            self._keys.pop(key, None)
            self._keys[key] = None
        gone = []
        while len(self._keys) > self._num_blocks:
            oldest = next(iter(self._keys))
            del self._keys[oldest]
            gone.append(oldest)
        changes = []
        if kept := [key for key in fresh if key in self._keys]:
            changes.append(pb.CacheEvent(stored=b"".join(kept)))
        if dropped := [key for key in gone if key not in fresh]:
            changes.append(pb.CacheEvent(removed=b"".join(dropped)))
        return changes

    def ended(self, keys: Sequence[BlockKey]) -> list[pb.CacheEvent]:
        """Return no change: what a request computed stays."""
        return []


class BatchOrder:
    """Order of one server's batches, by their numbers."""

    def __init__(self) -> None:
        self.next: int | None = None
        """Number of the batch that follows those applied; None before the first."""
        self._last_live = -1
        """Number of the last batch that was published to this subscriber, applied or not."""

    def judge(self, number: int) -> Literal["next", "known", "gap", "restart"]:
        """Judge a published batch. Of one publisher they ascend, so an earlier number is of a new process."""
        restarted = number <= self._last_live
        self._last_live = number
        if restarted:
            return "restart"
        if self.next is None:
            return "next" if number == 0 else "gap"
        if number < self.next:
            return "known"  # it was replayed already
        return "next" if number == self.next else "gap"

    def applied(self, number: int) -> None:
        self.next = number + 1


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
