"""Dropping of cached blocks: pins stay, both stores are asked, and a long drop is cut into parts."""

import pytest

from engine.core import cache_queries
from engine.core.cache_queries import drop_cached
from engine.core_types import SamplingParams, StepBudget
from engine.messages.from_engine import CacheChanged, CacheInspected
from engine.messages.to_engine import CacheDrop, Generate, InspectCache
from kvcache.block_keys import block_keys, root_key
from kvcache.pins import Retention
from kvcache.pool import Removed, Stored
from kvcache.store.bucket import BucketObjects
from support.memory_objects import MemoryObjects
from support.sim_model import LAYOUT
from support.trial_node import Node

WIDE = StepBudget(64, 64)
PROMPT, OTHER = tuple(range(10, 27)), tuple(range(40, 57))
"""Four full blocks of four tokens, and a token."""


class Engine(Node):
    def __init__(self, objects: MemoryObjects | None = None, local: MemoryObjects | None = None) -> None:
        super().__init__({}, "node", 32, WIDE, clock=lambda: 100.0, objects=objects, local=local)
        self.count = 0

    def serve(self, prompt: tuple[int, ...], retention: Retention | None = None) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.send(Generate(name, prompt, (), SamplingParams(2), "", 0, lender=None, retention=retention))
        self.settle()
        self.check_at_rest()

    def settle(self) -> None:
        moved = True
        while moved:
            moved = sum(store.step() for store in self.stores) > 0
            self.receive()
            moved |= self.core.step() or any(store.is_busy for store in self.stores)

    def ask(self, query: InspectCache) -> CacheInspected:
        self.said.clear()
        self.send(query)
        self.settle()
        self.check()
        (found,) = [message for message in self.said if isinstance(message, CacheInspected)]
        return found


def test_pinned_blocks_stay_unless_their_pins_are_dropped_first() -> None:
    engine = Engine()
    engine.serve(PROMPT, Retention(60.0, "acme"))
    engine.serve(OTHER)
    found = engine.ask(InspectCache(1, drop=CacheDrop(None)))
    assert (found.dropped_in_pool, found.in_use, found.is_whole) == (4, 4, True)
    found = engine.ask(InspectCache(2, drop=CacheDrop(PROMPT)))
    assert (found.dropped_in_pool, found.in_use) == (0, 4)
    found = engine.ask(InspectCache(3, drop_pins=True, drop=CacheDrop(PROMPT)))
    assert (found.dropped, found.dropped_in_pool, found.in_use, found.filled) == (4, 4, 0, 0)


def test_another_salt_or_adapter_names_other_blocks() -> None:
    engine = Engine()
    engine.serve(PROMPT)
    for drop in (CacheDrop(PROMPT, "salt"), CacheDrop(PROMPT, adapter=b"a"), CacheDrop(PROMPT[:3])):
        assert engine.ask(InspectCache(1, drop=drop)).dropped_in_pool == 0
    assert engine.ask(InspectCache(1, drop=CacheDrop(PROMPT[:8]))).dropped_in_pool == 2


def test_a_drop_of_all_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_queries, "MAX_DROPPED", 3)
    engine = Engine()
    engine.serve(PROMPT)
    engine.serve(OTHER)
    found = [engine.ask(InspectCache(number, drop=CacheDrop(None))) for number in range(3)]
    assert [(each.dropped_in_pool, each.is_whole) for each in found] == [(3, False), (3, False), (2, True)]


def test_blocks_that_only_the_local_store_holds_go_too_and_are_told_once() -> None:
    """Neither comes back after a restart; a block of the pool is not told twice for its copy in the store."""
    objects = MemoryObjects()
    engine = Engine(local=objects)
    engine.serve(PROMPT)
    cached, (store,) = engine.core.kv_cache.cached, engine.stores
    keys = block_keys(root_key(engine.core.model_fingerprint, ""), PROMPT, LAYOUT.block_tokens)
    foreign = [bytes([number]) * 16 for number in range(2)]
    content, fingerprint = next(iter(cached.memory.read_blocks([0]))), cached.fingerprints_of([0])
    for key in (keys[0], *foreign):
        store.put(bytes(16), key, content, fingerprint)
    store.settle()
    cached.take_events()
    assert drop_cached(cached, [keys[0], foreign[0]]) == (1, 1, 0, True, [keys[0], foreign[0]])
    store.remove([keys[0], foreign[0]], lambda count, failure: None)
    told = [key for event in cached.take_events() if isinstance(event, Removed) for key in event.keys]
    assert sorted(told) == sorted([keys[0], foreign[0]])
    found = engine.ask(InspectCache(1, drop=CacheDrop(None)))
    assert (found.dropped_in_pool, found.dropped_in_tiers, found.in_use, found.is_whole) == (3, 1, 0, True)
    assert objects.stored == {}


def test_the_answer_comes_when_the_local_store_has_removed_what_was_dropped() -> None:
    """A request after it would find the blocks there, since other processes write to the same folder."""
    objects = MemoryObjects()
    engine = Engine(local=objects)
    engine.serve(PROMPT)
    cached, (store,) = engine.core.kv_cache.cached, engine.stores
    store.put(bytes(16), bytes(range(16)), next(iter(cached.memory.read_blocks([0]))), cached.fingerprints_of([0]))
    store.settle()
    assert objects.stored
    engine.said.clear()
    engine.send(InspectCache(1, drop=CacheDrop(None)))
    engine.receive()
    assert not any(isinstance(message, CacheInspected) for message in engine.said)
    engine.settle()
    assert any(isinstance(message, CacheInspected) for message in engine.said)
    assert objects.stored == {}


def test_objects_of_a_prompt_leave_the_store_and_the_index_hears_of_it() -> None:
    objects = MemoryObjects(2)
    engine = Engine(objects)
    engine.stores[0].writes_at_once = True
    for prompt in (PROMPT, OTHER):
        engine.serve(prompt)
    assert len(objects.stored) == 8
    engine.core.report()
    found = engine.ask(InspectCache(1, drop=CacheDrop(PROMPT, store=True)))
    assert (found.dropped_in_pool, found.removed_objects, found.store_failure) == (4, 4, "")
    assert len(objects.stored) == 4
    engine.core.report()
    events = [event for m in engine.said if isinstance(m, CacheChanged) for event in m.events if event.shared]
    assert sum(len(event.keys) for event in events if isinstance(event, Removed)) == 4
    assert not [event for event in events if isinstance(event, Stored)]
    engine.serve(PROMPT)
    assert len(objects.stored) == 8, "it is written again"

    objects.broken = True
    found = engine.ask(InspectCache(2, drop=CacheDrop(OTHER, store=True)))
    assert (found.removed_objects, found.store_failure) == (0, "it is broken")
    objects.broken = False


def test_a_place_that_keeps_its_objects_is_refused_before_anything_is_dropped() -> None:
    objects = MemoryObjects(2)
    objects.keeps_objects = "bucket b: objects expire"
    engine = Engine(objects)
    engine.serve(PROMPT)
    drop = CacheDrop(PROMPT, store=True)
    found = engine.ask(InspectCache(1, drop=drop))
    assert (found.refused, found.dropped_in_pool) == ("bucket b: objects expire", 0)
    assert engine.ask(InspectCache(2, drop=drop._replace(store=False))).dropped_in_pool == 4
    assert "lifecycle rule" in BucketObjects.refusal_of("b")
