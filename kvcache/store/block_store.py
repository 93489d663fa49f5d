"""A store of an engine: rows, threads and counters around folders or a bucket.

Thread safety: everything but the functions passed to the executors belongs to the loop thread. Those touch only their
arguments and the objects, and report through a deque.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from kvcache.block_keys import BlockKey
from kvcache.layout import Allocate, private_rows
from kvcache.pool import CacheEvent, Removed, Stored
from kvcache.store.kv_store import (
    Fetched,
    KvStore,
    LocalObjects,
    ObjectFormat,
    ObjectMissing,
    ObjectRefused,
    Objects,
    PlaceUse,
    StoredBlock,
    StoreError,
)

READ_THREADS = 4
WRITE_THREADS = 2
FETCH_BYTES = 8 << 20
"""Size from which a fetch gets no further block."""
FETCHES_AT_ONCE = 8
WRITE_BYTES = 256 << 20
"""Memory for blocks that wait to be written."""
BUFFER_BYTES = WRITE_BYTES + FETCHES_AT_ONCE * FETCH_BYTES
"""Main memory that a store takes at most, for blocks smaller than FETCH_BYTES."""
MAX_KNOWN = 1 << 18
"""Largest number of keys remembered as stored, which are not written again."""
AVOID_S = 10.0
"""Seconds for which a store that fell silent is not asked."""
FLUSH_S = 5.0
COMPLAIN_EVERY_S = 60.0
log = logging.getLogger(__name__)


@dataclass(slots=True)
class StoreCounts:
    """Counters since the engine started."""

    written: int = 0
    dropped: int = 0
    """Blocks that were not written for lack of memory: the store is too slow."""
    failed: int = 0
    """Operations that failed for reasons of the folder or bucket."""
    refused: int = 0
    """Objects that were damaged, foreign or forged, or whose bytes differed from their fingerprint."""
    missing: int = 0
    """Objects that were gone between lookup and read."""
    evicted: int = 0
    """Objects that this engine removed to keep the bounds."""


@dataclass(frozen=True, slots=True)
class _Written:
    block: StoredBlock
    row: NDArray[np.uint8]
    was_there: bool
    evicted: tuple[BlockKey, ...]
    error: StoreError | None


@dataclass(frozen=True, slots=True)
class _Learned:
    """Result of a fetch or a look around: blocks that are there, and at most one that is not."""

    there: tuple[StoredBlock, ...] = ()
    refused: BlockKey | None = None
    missing: BlockKey | None = None
    error: StoreError | None = None


class BlockStore(KvStore):
    """Blocks of one model in `objects`."""

    def __init__(
        self,
        objects: Objects,
        object_format: ObjectFormat,
        writes_at_once: bool = False,
        is_local: bool = False,
        has_other_writers: bool = False,
        clock: Callable[[], float] = time.monotonic,
        executors: tuple[Executor, Executor] | None = None,
        allocate: Allocate = private_rows,
    ) -> None:
        """Create the store; `clock` returns seconds. `executors` replace the threads that read and that write.

        `allocate` returns the memory of fetches. A local store begins with what an earlier process has left there.
        """
        self._objects = objects
        self._format = object_format
        self._clock = clock
        self._allocate = allocate
        self.identity = objects.identity
        self.keeps_objects = objects.keeps_objects
        self.writes_at_once = writes_at_once
        self.is_local = is_local
        self.has_other_writers = has_other_writers
        self._name = "the local store" if is_local else "the shared store"
        self.blocks_per_fetch = max(1, min(objects.reads_at_once, FETCH_BYTES // object_format.object_bytes))
        self.counts = StoreCounts()
        self._readers, self._writers = executors or (
            ThreadPoolExecutor(READ_THREADS, "kv-store-read"),
            ThreadPoolExecutor(WRITE_THREADS, "kv-store-write"),
        )
        self._done: deque[_Written | _Learned] = deque()
        self._rows: list[NDArray[np.uint8]] = []
        self._num_rows = 0
        self.max_rows = max(4, WRITE_BYTES // object_format.object_bytes)
        self._buffers: list[NDArray[np.uint8]] = []
        self.num_fetching = 0
        """Fetches that were not given back."""
        self._waiting: deque[tuple[Sequence[BlockKey], Callable[[Fetched], object]]] = deque()
        self._known: OrderedDict[BlockKey, BlockKey] = OrderedDict()
        """Parents of the blocks that are known to be stored, by key."""
        self.writing: set[BlockKey] = set()
        """Blocks that are not written yet."""
        self._unwanted: set[BlockKey] = set()
        """Blocks that were removed while they were being written."""
        self._events: list[CacheEvent] = []
        self._avoid_until = -AVOID_S
        self._complained_at = -COMPLAIN_EVERY_S
        self.is_closed = False
        self._local = objects if is_local and isinstance(objects, LocalObjects) else None
        if self._local is not None:
            _logged(self._readers.submit(self._look_around, self._local))

    @property
    def answers(self) -> bool:
        return self._clock() >= self._avoid_until

    @property
    def num_writable(self) -> int:
        return len(self._rows) + self.max_rows - self._num_rows

    def lacks(self, key: BlockKey) -> bool:
        self._settle()
        return key not in self._known and key not in self.writing

    def num_known(self, keys: Iterable[BlockKey]) -> int:
        self._settle()
        count = 0
        for key in keys:
            if key not in self._known:
                break
            count += 1
        return count

    def known_keys(self) -> list[BlockKey]:
        self._settle()
        return list(self._known)

    def put(self, parent: BlockKey, key: BlockKey, content: NDArray[np.uint8], fingerprint: bytes) -> None:
        if self._rows:
            row = self._rows.pop()
        else:
            assert self._num_rows < self.max_rows
            row = np.empty(self._format.object_bytes, np.uint8)
            self._num_rows += 1
        row[self._format.payload_offset :] = content
        self.writing.add(key)
        _logged(self._writers.submit(self._write, StoredBlock(parent, key, fingerprint), row))

    def drop(self, count: int) -> None:
        self.counts.dropped += count

    def find(self, keys: Sequence[BlockKey], on_found: Callable[[int], object]) -> None:
        _logged(self._readers.submit(self._find, tuple(keys), on_found))

    def fetch(self, keys: Sequence[BlockKey], on_fetched: Callable[[Fetched], object]) -> None:
        assert 0 < len(keys) <= self.blocks_per_fetch
        self._waiting.append((tuple(keys), on_fetched))
        self._fetch_waiting()

    def give_back(self, fetched: Fetched) -> None:
        self.num_fetching -= 1
        if fetched.buffer is not None:
            self._buffers.append(fetched.buffer)
        self._fetch_waiting()

    def run(self, copy: Callable[[], None]) -> "Future[None]":
        return self._readers.submit(copy)

    def refuse(self, key: BlockKey) -> None:
        self._forget(key)
        self.counts.refused += 1
        _logged(self._writers.submit(self._remove, key))

    def remove(self, keys: Sequence[BlockKey], on_removed: Callable[[int, str], object]) -> None:
        for key in keys:
            self._known.pop(key, None)
        self._unwanted |= self.writing.intersection(keys)
        self._events.append(Removed(tuple(keys), shared=not self.is_local))
        _logged(self._writers.submit(self._remove_all, tuple(keys), on_removed))

    def fell_silent(self) -> None:
        self._avoid_until = self._clock() + AVOID_S

    def take_events(self) -> list[CacheEvent]:
        self._settle()
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[CacheEvent]:
        self._settle()
        return [Stored(parent, (key,), shared=not self.is_local) for key, parent in self._known.items()]

    def places(self) -> list[PlaceUse]:
        return [] if self._local is None else self._local.places()

    def outcomes(self) -> tuple[tuple[str, int], ...]:
        return tuple((field.name, getattr(self.counts, field.name)) for field in fields(self.counts))

    def close(self) -> None:
        self.is_closed = True
        self._readers.shutdown(wait=False, cancel_futures=True)
        until = time.monotonic() + FLUSH_S
        while self.writing and time.monotonic() < until:
            time.sleep(0.01)
            self._settle()
        self._writers.shutdown(wait=False, cancel_futures=True)
        if self.writing:
            log.warning("%d blocks were not written to %s within %g s", len(self.writing), self._name, FLUSH_S)
        else:
            self._objects.close()

    def _fetch_waiting(self) -> None:
        """Start fetches for which there is memory."""
        while self._waiting and self.num_fetching < FETCHES_AT_ONCE and not self.is_closed:
            keys, on_fetched = self._waiting.popleft()
            buffer = self._buffers.pop() if self._buffers else self._new_buffer()
            self.num_fetching += 1
            _logged(self._readers.submit(self._fetch, keys, buffer, on_fetched))

    def _new_buffer(self) -> NDArray[np.uint8]:
        return self._allocate(self.blocks_per_fetch, self._format.object_bytes)

    def _settle(self) -> None:
        """Process what the threads have done."""
        while self._done:
            done = self._done.popleft()
            if isinstance(done, _Written):
                self._settle_write(done)
            else:
                self._settle_fetch(done)

    def _settle_write(self, done: _Written) -> None:
        self.writing.discard(done.block.key)
        self._rows.append(done.row)
        if done.error is not None:
            self._complain("written", done.error)
        elif done.block.key in self._unwanted:
            _logged(self._writers.submit(self._remove, done.block.key))
        else:
            self.counts.written += not done.was_there
            self._know(done.block)
        self._unwanted.discard(done.block.key)
        for key in done.evicted:
            self.counts.evicted += 1
            self._forget(key)

    def _settle_fetch(self, done: _Learned) -> None:
        for block in done.there:
            self._know(block)
        if done.refused is not None:
            self.refuse(done.refused)
        if done.missing is not None:
            self.counts.missing += 1
            self._forget(done.missing)
        if done.error is not None:
            self._complain("read", done.error)

    def _know(self, block: StoredBlock) -> None:
        if block.key in self._known:
            self._known.move_to_end(block.key)
            return
        self._known[block.key] = block.parent
        self._events.append(Stored(block.parent, (block.key,), shared=not self.is_local))
        if len(self._known) > MAX_KNOWN and not self.is_local:
            self._known.popitem(last=False)

    def _forget(self, key: BlockKey) -> None:
        self._known.pop(key, None)
        self._events.append(Removed((key,), shared=not self.is_local))

    def _complain(self, what: str, error: StoreError) -> None:
        self.counts.failed += 1
        now = time.monotonic()
        if now - self._complained_at >= COMPLAIN_EVERY_S:
            self._complained_at = now
            log.warning("%s cannot be %s: %s", self._name, what, error)

    # ------------------------------------------------------------------ on the store's threads

    def _write(self, block: StoredBlock, row: NDArray[np.uint8]) -> None:
        name = self._format.name(block.key)
        was_there, evicted, failure = False, list[BlockKey](), None
        try:
            was_there = self._objects.held([name])[0]
            if was_there:
                self._objects.used(name)
            else:
                self._format.pack(block, row)
                self._objects.write(name, row)
                evicted = [key for each in self._objects.trim(name) if (key := _key_of(each)) is not None]
        except StoreError as error:
            failure = error
        self._done.append(_Written(block, row, was_there, tuple(evicted), failure))

    def _remove(self, key: BlockKey) -> None:
        try:
            self._objects.remove(self._format.name(key))
        except StoreError as error:
            self._done.append(_Learned(error=error))

    def _remove_all(self, keys: Sequence[BlockKey], on_removed: Callable[[int, str], object]) -> None:
        count, failure = 0, ""
        try:
            for name in map(self._format.name, keys):
                count += self._objects.held([name])[0]
                self._objects.remove(name)
        except StoreError as error:
            failure = str(error)
        on_removed(count, failure)

    def _find(self, keys: Sequence[BlockKey], on_found: Callable[[int], object]) -> None:
        num_found = 0
        try:
            num_found = self._num_held(keys)
        except StoreError as error:
            self._done.append(_Learned(error=error))
        on_found(num_found)

    def _num_held(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading keys are held.

        Assumes that a chain is held from its head, as evictions of the longest unused do: reads find out.
        """
        low, high = 0, len(keys)  # keys before `low` are held, the one at `high` is not
        step = 1
        while low < high:  # doubling steps first, since most prompts are new
            at = min(low + step, high) - 1
            if self._objects.held([self._format.name(keys[at])])[0]:
                low, step = at + 1, 2 * step
            else:
                high, step = at, max(1, (at - low) // 2)
        return low

    def _fetch(
        self, keys: Sequence[BlockKey], buffer: NDArray[np.uint8], on_fetched: Callable[[Fetched], object]
    ) -> None:
        names, rows = [self._format.name(key) for key in keys], list(buffer[: len(keys)])
        blocks: list[StoredBlock] = []
        reason, refused, missing, failed = "", None, None, None
        for key, row, failure in zip(keys, rows, self._objects.read(names, rows), strict=True):
            if isinstance(failure, StoreError):
                reason, failed = str(failure), failure
            elif isinstance(failure, ObjectMissing):
                reason, missing = f"{self._name} holds it no more", key
            else:
                try:
                    blocks.append(self._format.check(key, row))
                except ObjectRefused as error:
                    reason, refused = f"the stored block was refused: {error}", key
            if reason:
                break
        for name in reversed(names[: len(blocks)]):  # the tail of a chain is evicted before its head
            self._objects.used(name)
        self._done.append(_Learned(tuple(blocks), refused, missing, failed))
        contents = tuple(row[self._format.payload_offset :] for row in rows[: len(blocks)])
        on_fetched(Fetched(tuple(block.fingerprint for block in blocks), contents, reason, buffer))

    def _look_around(self, objects: LocalObjects) -> None:
        """Learn what an earlier process has left in a local store; objects that are none are removed."""
        try:
            for name, head in objects.heads(self._format.folder, self._format.payload_offset):
                key = _key_of(name)
                try:
                    if key is not None:
                        self._done.append(_Learned((self._format.check_head(key, head),)))
                except ObjectRefused:
                    self._done.append(_Learned(refused=key))
        except StoreError as error:
            self._done.append(_Learned(error=error))


def _logged(future: "Future[None]") -> None:
    """Log what a thread of a store raises: nothing should."""

    def log_failure(done: "Future[None]") -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("an operation of a KV store failed", exc_info=error)

    future.add_done_callback(log_failure)


def _key_of(name: str) -> BlockKey | None:
    try:
        return bytes.fromhex(name.rpartition("/")[2])
    except ValueError:
        return None
