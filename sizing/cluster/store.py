"""The store that workers share, in virtual time: which blocks it holds, and how long reads and writes take.

The place is one more NIC of `links.py`, which all its readers and writers share. A lookup and the beginning of a read
take the place's latency. Blocks have no bytes.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from kvcache.block_keys import BlockKey
from kvcache.layout import KvLayout
from kvcache.pool import CacheEvent, Removed, Stored
from kvcache.store.block_store import FETCH_BYTES, FETCHES_AT_ONCE, WRITE_BYTES
from kvcache.store.kv_store import Fetched, KvStore
from sizing.cluster.clock import VirtualClock
from sizing.cluster.links import Links
from sizing.cluster.runner import NO_BYTES

NAME = "shared-store"


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Specification of a store."""

    capacity_bytes: float
    bytes_per_s: float = 10e9
    """Bandwidth in each direction, shared by all workers."""
    latency_s: float = 0.001
    """Seconds of a lookup, and of a read before its first byte."""
    reads_at_once: int = 16
    """Objects of one read."""
    writes_at_once: bool = False
    """Whether blocks are written as soon as they are computed, not when they are evicted."""


class VirtualPlace:
    """Blocks of the store, the longest unused first."""

    def __init__(self, spec: StoreSpec, layout: KvLayout) -> None:
        self.spec = spec
        self.max_blocks = int(spec.capacity_bytes // layout.block_bytes)
        self.blocks: OrderedDict[BlockKey, BlockKey] = OrderedDict()
        """Parents by key."""

    def add(self, parent: BlockKey, key: BlockKey) -> BlockKey | None:
        """Add a block; return the block evicted for it."""
        self.blocks[key] = parent
        self.blocks.move_to_end(key)
        return self.blocks.popitem(last=False)[0] if len(self.blocks) > self.max_blocks else None

    def num_held(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading keys are held."""
        return next((at for at, key in enumerate(keys) if key not in self.blocks), len(keys))


class VirtualStore(KvStore):
    """The store of one worker."""

    identity = NAME

    def __init__(
        self, place: VirtualPlace, worker_id: str, layout: KvLayout, clock: VirtualClock, links: Links
    ) -> None:
        spec = place.spec
        self._place, self._worker_id, self._clock, self._links = place, worker_id, clock, links
        self._block_bytes = layout.block_bytes
        self._fingerprint = bytes(8 * layout.kv_heads)
        self.writes_at_once = spec.writes_at_once
        self.blocks_per_fetch = max(1, min(spec.reads_at_once, FETCH_BYTES // layout.block_bytes))
        self._max_writes = max(4, WRITE_BYTES // layout.block_bytes)
        self._to_write: dict[BlockKey, BlockKey] = {}
        self._writing: dict[BlockKey, BlockKey] = {}
        self._known: dict[BlockKey, BlockKey] = {}
        """Parents by key."""
        self._events: list[CacheEvent] = []
        self._num_fetching = 0
        self._waiting: list[tuple[Sequence[BlockKey], Callable[[Fetched], object]]] = []
        self.num_dropped = 0

    @property
    def answers(self) -> bool:
        return True

    @property
    def num_writable(self) -> int:
        return self._max_writes - len(self._to_write) - len(self._writing)

    def lacks(self, key: BlockKey) -> bool:
        return key not in self._known and key not in self._to_write and key not in self._writing

    def num_known(self, keys: Iterable[BlockKey]) -> int:
        return sum(1 for _ in takewhile(self._known.__contains__, keys))

    def known_keys(self) -> list[BlockKey]:
        return list(self._known)

    def put(self, parent: BlockKey, key: BlockKey, content: NDArray[np.uint8], fingerprint: bytes) -> None:
        self._to_write[key] = parent
        if not self._writing:
            self._clock.after(0.0, self._write)

    def drop(self, count: int) -> None:
        self.num_dropped += count

    def find(self, keys: Sequence[BlockKey], on_found: Callable[[int], object]) -> None:
        self._clock.after(self._place.spec.latency_s, lambda: on_found(self._place.num_held(keys)))

    def fetch(self, keys: Sequence[BlockKey], on_fetched: Callable[[Fetched], object]) -> None:
        self._waiting.append((keys, on_fetched))
        self._fetch_waiting()

    def give_back(self, fetched: Fetched) -> None:
        self._num_fetching -= 1
        self._fetch_waiting()

    def run(self, copy: Callable[[], None]) -> "Future[None]":
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def refuse(self, key: BlockKey) -> None:
        raise AssertionError("no block arrives damaged")

    def remove(self, keys: Sequence[BlockKey], on_removed: Callable[[int, str], object]) -> None:
        raise AssertionError("a simulated operator removes nothing")

    def fell_silent(self) -> None:
        """Do nothing: a slow store is asked again."""

    def take_events(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[CacheEvent]:
        return [Stored(parent, (key,), shared=True) for key, parent in self._known.items()]

    def close(self) -> None:
        self._to_write.clear()
        self._waiting.clear()

    def _fetch_waiting(self) -> None:
        while self._waiting and self._num_fetching < FETCHES_AT_ONCE:
            keys, on_fetched = self._waiting.pop(0)
            self._num_fetching += 1
            self._clock.after(self._place.spec.latency_s, self._read, keys, on_fetched)

    def _read(self, keys: Sequence[BlockKey], on_fetched: Callable[[Fetched], object]) -> None:
        """Read what is held; it may be evicted meanwhile."""
        count = self._place.num_held(keys)
        failure = "" if count == len(keys) else "the shared store holds it no more"
        for key in keys[:count]:
            self._know(self._place.blocks[key], key)
            self._place.blocks.move_to_end(key)
        if failure:
            self._forget(keys[count])
        fetched = Fetched((self._fingerprint,) * count, (NO_BYTES,) * count, failure)
        if count:
            num_bytes = count * self._block_bytes
            self._links.transfer(NAME, self._worker_id, num_bytes, lambda whole: whole and on_fetched(fetched))
        else:
            on_fetched(fetched)

    def _write(self) -> None:
        if self._writing or not self._to_write:
            return
        self._writing, self._to_write = self._to_write, {}
        missing = [key for key in self._writing if key not in self._place.blocks]
        self._links.transfer(self._worker_id, NAME, max(1, len(missing) * self._block_bytes), self._written)

    def _written(self, whole: bool) -> None:
        written, self._writing = self._writing, {}
        if not whole:
            return
        for key, parent in written.items():
            self._know(parent, key)
            if (evicted := self._place.add(parent, key)) is not None:
                self._forget(evicted)
        self._write()

    def _know(self, parent: BlockKey, key: BlockKey) -> None:
        if key not in self._known:
            self._known[key] = parent
            self._events.append(Stored(parent, (key,), shared=True))

    def _forget(self, key: BlockKey) -> None:
        self._known.pop(key, None)
        self._events.append(Removed((key,), shared=True))
