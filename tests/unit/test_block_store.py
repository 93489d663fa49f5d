"""The shared store of an engine, whose reads and writes happen when the test says so."""

from collections.abc import Sequence

from kvcache.block_keys import BlockKey, block_keys
from kvcache.pool import CacheEvent, Removed, Stored
from kvcache.store import block_store
from kvcache.store.kv_store import Fetched, ObjectFormat
from support.memory_objects import MemoryObjects, StepStore
from support.small_blocks import BLOCK_BYTES, HEADS, MODEL, ROOT, block_of, fingerprint_of

FORMAT = ObjectFormat(BLOCK_BYTES, HEADS, MODEL)
KEYS = block_keys(ROOT, range(400), 4)


class Stores:
    """Two engines' stores over one place, and the time."""

    def __init__(self, objects: MemoryObjects | None = None) -> None:
        self.now = 100.0
        self.objects = objects or MemoryObjects()
        self.one, self.two = (StepStore(self.objects, FORMAT, lambda: self.now) for _ in range(2))

    def put(self, store: StepStore, *indices: int) -> list[CacheEvent]:
        for index in indices:
            block = block_of(index)
            if store.lacks(KEYS[index]):
                store.put(KEYS[index - 1] if index else ROOT, KEYS[index], block, fingerprint_of(block))
        store.settle()
        return store.take_events()

    def find(self, store: StepStore, keys: Sequence[BlockKey]) -> int:
        found: list[int] = []
        store.find(keys, found.append)
        store.settle()
        (count,) = found
        return count

    def fetch(self, store: StepStore, keys: Sequence[BlockKey]) -> Fetched:
        fetched: list[Fetched] = []
        store.fetch(keys, fetched.append)
        store.settle()
        (brought,) = fetched
        return brought


def test_a_block_is_written_once_whoever_has_it() -> None:
    stores = Stores()
    stores.put(stores.one, 0)
    assert not stores.one.lacks(KEYS[0])
    written = dict(stores.objects.stored)
    stores.put(stores.two, 0)
    assert stores.objects.stored == written
    assert stores.two.counts.written == 0


def test_every_number_of_leading_blocks_is_found() -> None:
    for count in range(40):
        stores = Stores()
        stores.put(stores.one, *range(count))
        assert stores.find(stores.two, KEYS[:33]) == min(count, 33)


def test_a_store_too_slow_to_write_has_no_memory_for_more() -> None:
    stores = Stores()
    stores.one.max_rows = 2
    for index in range(2):
        block = block_of(index)
        stores.one.put(ROOT, KEYS[index], block, fingerprint_of(block))
    assert stores.one.num_writable == 0
    stores.one.settle()
    assert stores.one.lacks(KEYS[3])
    assert not stores.one.lacks(KEYS[0])
    assert stores.one.num_writable == 2


def test_a_missing_a_damaged_and_a_foreign_object_end_a_fetch_before_them() -> None:
    for spoil, reason, count in (
        (lambda stored, name: stored.pop(name), "no more", "missing"),
        (lambda stored, name: stored.update({name: b"x" * len(stored[name])}), "refused", "refused"),
        (lambda stored, name: stored.update({name: stored[FORMAT.name(KEYS[0])]}), "another block", "refused"),
    ):
        stores = Stores()
        stores.put(stores.one, 0, 1, 2)
        spoil(stores.objects.stored, FORMAT.name(KEYS[1]))
        brought = stores.fetch(stores.two, KEYS[:3])
        assert reason in brought.failure
        assert len(brought.contents) == 1
        events = stores.two.take_events()
        assert events == [Stored(ROOT, (KEYS[0],), shared=True), Removed((KEYS[1],), shared=True)]
        assert getattr(stores.two.counts, count) == 1
        stores.two.settle()
        assert FORMAT.name(KEYS[1]) not in stores.objects.stored, "nobody reads it again"


def test_evicted_blocks_are_reported_by_whoever_evicted_them() -> None:
    stores = Stores(MemoryObjects(max_objects=2))
    stores.put(stores.one, 0, 1)
    assert stores.put(stores.two, 2) == [Stored(KEYS[1], (KEYS[2],), shared=True), Removed((KEYS[0],), shared=True)]
    assert stores.two.counts.evicted == 1


def test_a_broken_store_fails_by_name_and_is_used_again_when_it_works() -> None:
    stores = Stores()
    stores.put(stores.one, 0)
    stores.objects.broken = True
    assert stores.put(stores.two, 1) == []
    assert stores.find(stores.two, KEYS[:1]) == 0
    assert stores.fetch(stores.two, KEYS[:1]).failure == "it is broken"
    assert stores.two.take_events() == []
    assert stores.two.counts.failed == 3
    stores.objects.broken = False
    assert stores.find(stores.two, KEYS[:2]) == 1


def test_a_silent_store_is_avoided_for_a_while() -> None:
    stores = Stores()
    assert stores.one.answers
    stores.one.fell_silent()
    assert not stores.one.answers
    stores.now += block_store.AVOID_S
    assert stores.one.answers


def test_fetches_beyond_the_memory_wait_for_one_that_is_given_back(monkeypatch) -> None:
    monkeypatch.setattr(block_store, "FETCHES_AT_ONCE", 2)
    stores = Stores()
    stores.put(stores.one, 0, 1, 2)
    fetched: list[Fetched] = []
    for index in range(3):
        stores.one.fetch(KEYS[index : index + 1], fetched.append)
    stores.one.settle()
    assert len(fetched) == 2
    stores.one.give_back(fetched[0])
    stores.one.settle()
    assert len(fetched) == 3
    assert fetched[2].buffer is fetched[0].buffer
