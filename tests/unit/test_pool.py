"""The block pool: exact examples, then any sequence of calls against a brute-force model."""

from collections import Counter
from collections.abc import Sized
from copy import deepcopy

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache.block_keys import BlockKey, block_keys
from kvcache.block_pool import BlockPool
from kvcache.pool import Removed, Stored

ROOT = b"root"


def chain(*tokens: int) -> list[BlockKey]:
    """Keys of one block per token."""
    return block_keys(ROOT, tokens, 1)


def cached_chain(pool: BlockPool, *tokens: int) -> list[BlockKey]:
    """Compute a chain, name it, let it go."""
    keys = chain(*tokens)
    assert pool.reserve_with((), len(keys))
    blocks = pool.allocate(len(keys))
    pool.publish(ROOT, keys, blocks)
    pool.release(blocks)
    return keys


def counts(pool: BlockPool) -> tuple[int, int, int, int]:
    return pool.num_available, pool.num_held, pool.num_reserved, pool.num_quarantined


# ------------------------------------------------------------------------------------------- examples


def one_by_one(pool: BlockPool, count: int) -> list[int]:
    """Blocks in the order in which they are taken."""
    return [block for _ in range(count) for block in pool.allocate(1)]


def test_blocks_come_in_order_and_return_to_the_end() -> None:
    pool = BlockPool(4)
    assert pool.reserve_with((), 3)
    assert counts(pool) == (1, 0, 3, 0)
    assert pool.allocate(2) == [0, 1]
    assert counts(pool) == (1, 2, 1, 0)
    pool.release([0, 1])
    assert pool.allocate(1) == [2]
    pool.release([2])
    assert pool.reserve_with((), 4)
    assert one_by_one(pool, 4) == [3, 1, 0, 2]


def test_eviction_takes_the_oldest_and_the_tail_of_a_chain_first() -> None:
    pool = BlockPool(4)
    first = cached_chain(pool, 1, 2)
    second = cached_chain(pool, 7, 8)
    assert pool.take_events() == [Stored(ROOT, tuple(first)), Stored(ROOT, tuple(second))]
    assert pool.reserve_with((), 3)
    assert pool.allocate(1) == [1]
    assert pool.match(first) == [0]
    assert pool.allocate(2) == [0, 3]
    assert pool.match(second) == [2]
    assert pool.take_events() == [Removed((first[1],)), Removed((first[0], second[1]))]


def test_touch_repairs_the_order_of_a_chain_released_head_first() -> None:
    pool = BlockPool(4)
    keys = cached_chain(pool, 1, 2, 3)
    blocks = pool.match(keys)
    pool.acquire(blocks)
    for block in blocks:
        pool.release([block])
    pool.touch([*keys, b"unknown"])
    assert pool.reserve_with((), 3)
    assert one_by_one(pool, 3) == [3, 2, 1]


def test_a_name_stays_with_the_block_that_has_it() -> None:
    pool = BlockPool(4)
    keys = cached_chain(pool, 1, 2)
    pool.take_events()
    assert pool.reserve_with((), 2)
    blocks = pool.allocate(2)
    longer = chain(1, 5)
    pool.publish(ROOT, longer, blocks)
    assert pool.match(longer) == [0, blocks[1]]
    assert pool.take_events() == [Stored(keys[0], (longer[1],))], "the run follows the block known before"
    pool.release(blocks)
    assert pool.num_available == 4
    pool.check_integrity([])


def test_a_run_that_is_known_in_the_middle_becomes_two() -> None:
    pool = BlockPool(8)
    keys = chain(1, 2, 3, 4)
    assert pool.reserve_with((), 5)
    middle = pool.allocate(1)
    pool.publish(keys[0], [keys[1]], middle)
    pool.publish(ROOT, keys, pool.allocate(4))
    assert pool.take_events() == [
        Stored(keys[0], (keys[1],)),
        Stored(ROOT, (keys[0],)),
        Stored(keys[1], (keys[2], keys[3])),
    ]


def test_quarantine_takes_a_block_from_its_holder_and_from_everyone() -> None:
    pool = BlockPool(4)
    assert pool.reserve_with((), 2)
    blocks = pool.allocate(2)
    pool.quarantine([0])
    assert counts(pool) == (2, 1, 0, 1)
    pool.check_integrity([[1]])
    assert not pool.reserve_with((), 3)
    pool.release(blocks[1:])
    pool.unquarantine([0])
    pool.check_integrity([])
    assert counts(pool) == (4, 0, 0, 0)


def test_named_or_shared_blocks_cannot_be_quarantined() -> None:
    pool = BlockPool(4)
    assert pool.reserve_with((), 2)
    shared, named = pool.allocate(2)
    pool.acquire([shared])
    pool.publish(ROOT, chain(1), [named])
    for block in (shared, named, 3):
        with pytest.raises(AssertionError):
            pool.quarantine([block])


def test_a_snapshot_rebuilds_the_index() -> None:
    pool = BlockPool(4)
    keys = cached_chain(pool, 1, 2)
    assert pool.snapshot() == [Stored(ROOT, (keys[0],)), Stored(keys[0], (keys[1],))]


@pytest.mark.parametrize("fault", ["lost", "twice", "unnamed", "stale name", "overpromised", "claim", "quarantined"])
def test_the_integrity_check_sees(fault: str) -> None:
    pool = BlockPool(4)
    cached_chain(pool, 1, 2)
    pool.check_integrity([])
    holders: list[list[int]] = []
    match fault:
        case "lost":
            pool.num_blocks += 1
        case "twice":
            pool.quarantined.add(pool.num_blocks - 1)
            pool.unquarantine([pool.num_blocks - 1])
        case "unnamed":
            del pool.name_of[0]
        case "stale name":
            pool.name_of[0] = (ROOT, b"ghost")
        case "overpromised":
            assert pool.reserve_with((), 4)
            pool.acquire([0])
        case "claim":
            holders = [[0]]
        case "quarantined":
            pool.quarantined.add(0)
    with pytest.raises(AssertionError):
        pool.check_integrity(holders)


# ---------------------------------------------------------------------------------- against a model


class PoolModel(RuleBasedStateMachine):
    """Lists and counters, kept with no regard to speed. `holders` are chains that somebody computes or lends."""

    NUM_BLOCKS = 8

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.free = list(range(self.NUM_BLOCKS))
        self.cached: list[int] = []  # oldest first
        self.names: dict[int, BlockKey] = {}
        self.quarantined: list[int] = []
        self.reserved = 0
        self.index: set[BlockKey] = set()  # as told by events
        # [blocks, keys of the chain it computes, how many of its blocks are named, promise]
        self.holders: list[tuple[list[int], list[BlockKey], list[int]]] = []
        self.lent: list[list[int]] = []

    def refs(self) -> Counter[int]:
        held = [blocks for blocks, _, _ in self.holders] + self.lent
        return Counter(block for blocks in held for block in blocks)

    def drop(self, blocks: list[int]) -> None:
        """After the references are gone from the holders: where each block goes, tail first."""
        left = self.refs()
        for block in reversed(blocks):
            if not left[block]:
                (self.cached if block in self.names else self.free).append(block)

    def pick(self, data: st.DataObject, things: Sized) -> int:
        return data.draw(st.integers(0, len(things) - 1))

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6), extra=st.integers(0, 2))
    def start(self, tokens: list[int], extra: int) -> None:
        keys = chain(*tokens)
        by_key = {key: block for block, key in self.names.items()}
        hits = []
        for key in keys:
            if key not in by_key:
                break
            hits.append(by_key[key])
        assert self.pool.match(keys) == hits
        num_new = len(keys) - len(hits) + extra
        pinned = [block for block in hits if block in self.cached]
        fits = len(self.free) + len(self.cached) - len(pinned) - self.reserved >= num_new
        assert self.pool.reserve_with(hits, num_new) is fits
        if fits:
            self.cached = [block for block in self.cached if block not in pinned]
            self.reserved += num_new
            self.holders.append((hits, keys, [len(hits), num_new]))

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), max_size=6), extra=st.integers(0, 3))
    def foresee(self, data: st.DataObject, tokens: list[int], extra: int) -> None:
        """What a reservation would say if some holders were gone."""
        gone = [holder for holder in self.holders if data.draw(st.booleans())]
        hits = self.pool.match(chain(*tokens))
        num_new = len(tokens) - len(hits) + extra
        blocks, promised = [holder[0] for holder in gone], sum(progress[1] for _, _, progress in gone)
        later = deepcopy(self.pool)
        for held in blocks:
            later.release(held)
        later.unreserve(promised)
        expected = later.reserve_with(hits, num_new)
        assert self.pool.could_reserve_without(blocks, promised, hits, num_new) is expected

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        blocks, _, progress = self.holders[self.pick(data, self.holders)]
        count = data.draw(st.integers(0, progress[1]))
        expected = []
        for _ in range(count):
            if self.free:
                expected.append(self.free.pop(0))
            else:
                expected.append(self.cached.pop(0))
                del self.names[expected[-1]]
        assert self.pool.allocate(count) == sorted(expected), "in order, so that neighbours are read as one span"
        blocks += expected
        progress[1] -= count
        self.reserved -= count

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        blocks, keys, progress = self.holders[self.pick(data, self.holders)]
        first = progress[0]
        end = data.draw(st.integers(first, max(first, min(len(blocks), len(keys)))))
        self.pool.publish(keys[first - 1] if first else ROOT, keys[first:end], blocks[first:end])
        for key, block in zip(keys[first:end], blocks[first:end], strict=True):
            if key not in self.names.values():
                self.names[block] = key
        progress[0] = end

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        blocks, _, progress = self.holders.pop(self.pick(data, self.holders))
        self.pool.release(blocks)
        self.pool.unreserve(progress[1])
        self.reserved -= progress[1]
        self.drop(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        """Take references of blocks that somebody holds or that are cached, as a loan does."""
        blocks, _, progress = self.holders[self.pick(data, self.holders)]
        lent = blocks[: progress[0]]
        self.pool.acquire(lent)
        self.lent.append(list(lent))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def release_range(self, data: st.DataObject) -> None:
        lent = self.lent[self.pick(data, self.lent)]
        first = data.draw(st.integers(0, len(lent)))
        part = lent[first : data.draw(st.integers(first, len(lent)))]
        lent[first : first + len(part)] = []
        self.pool.release(part)
        self.drop(part)

    @rule(tokens=st.lists(st.integers(0, 2), max_size=6))
    def touch(self, tokens: list[int]) -> None:
        keys = chain(*tokens)
        self.pool.touch(keys)
        by_key = {key: block for block, key in self.names.items()}
        for key in reversed(keys):
            if (block := by_key.get(key)) in self.cached:
                self.cached.remove(block)
                self.cached.append(block)

    @rule(tokens=st.lists(st.integers(0, 2), max_size=6), limit=st.none() | st.integers(0, 3))
    def drop_idle(self, tokens: list[int], limit: int | None) -> None:
        """Blocks of a chain, or the next to be evicted, that nobody holds."""
        keys = chain(*tokens) if limit is None else self.pool.idle_keys(limit)
        if limit is not None:
            assert keys == [self.names[block] for block in self.cached[:limit]]
        by_key = {key: block for block, key in self.names.items()}
        gone = [key for key in keys if by_key.get(key) in self.cached]
        assert self.pool.drop_idle(keys) == gone
        for key in gone:
            self.cached.remove(by_key[key])
            self.free.append(by_key[key])
            del self.names[by_key[key]]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        """The tail of a chain that is read from a peer: unnamed, and nobody else's."""
        blocks, _, progress = self.holders[self.pick(data, self.holders)]
        first = data.draw(st.integers(progress[0], len(blocks)))
        tail = blocks[first:]
        self.pool.quarantine(tail)
        del blocks[first:]
        self.quarantined += tail

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def unquarantine(self, data: st.DataObject) -> None:
        block = self.quarantined.pop(self.pick(data, self.quarantined))
        self.pool.unquarantine([block])
        self.free.append(block)

    @invariant()
    def books_balance(self) -> None:
        refs = self.refs()
        self.pool.check_integrity([blocks for blocks, _, _ in self.holders] + self.lent)
        assert self.pool.num_blocks - self.pool.num_filled == len(self.free)
        assert [each.block for each in self.pool.oldest(self.pool.num_blocks)] == self.cached
        assert self.pool.num_held == len(refs)
        assert self.pool.num_named_held == len(set(self.names) & set(refs))
        assert self.pool.num_reserved == self.reserved
        assert self.pool.num_quarantined == len(self.quarantined)
        assert self.pool.num_available == len(self.free) + len(self.cached) - self.reserved >= 0

    @invariant()
    def events_tell_all(self) -> None:
        """Whoever replays the events, or takes a snapshot, knows exactly what is named."""
        for event in self.pool.take_events():
            if isinstance(event, Stored):
                assert not self.index & set(event.keys)
                self.index |= set(event.keys)
            else:
                assert set(event.keys) <= self.index
                self.index -= set(event.keys)
        assert self.index == set(self.names.values())
        told = [event.keys for event in self.pool.snapshot() if isinstance(event, Stored)]
        assert {key for keys in told for key in keys} == self.index


TestPoolModel = PoolModel.TestCase
