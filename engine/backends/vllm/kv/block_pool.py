"""Tandem's view of vLLM's block pool.

vLLM's `BlockPool` owns the blocks: reference counts, the free queue and the hashes of its prefix cache, which are
Tandem's block keys here. This adapter adds what loans need:

- *reservations*, counted only: so many blocks will be free when an admitted sequence asks for them;
- an index of *filled* blocks. vLLM names a block when it schedules the step that will fill it; a block may be lent
  only once that step has ended and its fingerprint is taken;
- *quarantined* blocks, which a read that cannot be stopped may still write.

With several KV groups a block's name stands for its key and its group, and the pool also knows at which boundaries a
request can go on.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from vllm.v1.core.block_pool import BlockPool as VllmPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from engine.backends.vllm.kv.boundaries import Boundaries, announced, withdrawn
from engine.backends.vllm.kv.groups import KvGroups
from kvcache.block_keys import BlockKey
from kvcache.chain import GroupBlock
from kvcache.pool import CacheEvent, NamedBlock, Removed, Stored


class GroupPlace(NamedTuple):
    """A block of the pool, its name, and its place in a chain."""

    block: int
    parent: BlockKey
    """Name of the block that a chain must have for this one to be of use: the one before, or that of the chain."""
    key: BlockKey
    """Its name."""
    of: GroupBlock


class _AllocationWatcher:
    """Receiver of vLLM's pool events: tells the pool of reused blocks, and vLLM's metrics collector of all."""

    def __init__(self, pool: "VllmBlockPool", collector: Any) -> None:
        self._pool = pool
        self._collector = collector

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        self._pool.reused(block.block_id)
        if self._collector is not None:
            self._collector.on_block_allocated(block)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _ignore if self._collector is None else getattr(self._collector, name)


def _ignore(*_: Any) -> None:
    """Do nothing with an event."""


class VllmBlockPool:
    """Adapter that implements `KvPool`. Block 0 is vLLM's null block and never appears."""

    def __init__(self, pool: VllmPool, groups: KvGroups) -> None:
        """Create the adapter."""
        self.on_evict: Callable[[list[NamedBlock]], None] | None = None
        """Function that is called with each named block that vLLM reuses, while its bytes are still there."""
        self._pool = pool
        self.num_blocks = int(pool.num_gpu_blocks) - 1
        self._groups = groups
        self._boundaries = None if groups.is_chain else Boundaries(groups.tails())
        self._block_of: dict[BlockKey, int] = {}
        self.place_of: dict[int, GroupPlace] = {}
        """Place of each named block."""
        self.quarantined: set[int] = set()
        """Blocks that an unfinished read may still write into."""
        self._reserved = 0
        self._events: list[CacheEvent] = []
        assert pool.enable_caching
        pool.metrics_collector = _AllocationWatcher(self, pool.metrics_collector)

    # ------------------------------------------------------------------ counts

    @property
    def num_ids(self) -> int:
        return int(self._pool.num_gpu_blocks)

    @property
    def num_available(self) -> int:
        return max(0, int(self._pool.get_num_free_blocks()) - self._reserved)

    @property
    def num_unused(self) -> int:
        """Number of blocks that vLLM could allocate now, reserved ones included."""
        return int(self._pool.get_num_free_blocks())

    @property
    def num_filled(self) -> int:
        """Number of blocks in use or named, whichever are more: counting both exactly would walk the whole pool."""
        return max(self.num_blocks - int(self._pool.get_num_free_blocks()), len(self.place_of))

    @property
    def num_held(self) -> int:
        return self.num_blocks - int(self._pool.get_num_free_blocks()) - len(self.quarantined)

    @property
    def num_reserved(self) -> int:
        return self._reserved

    @property
    def num_quarantined(self) -> int:
        return len(self.quarantined)

    def num_refs(self, block: int) -> int:
        return int(self._pool.blocks[block].ref_cnt)

    # ------------------------------------------------------------------ names

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._block_of

    def named(self, key: BlockKey) -> NamedBlock | None:
        return None if (block := self._block_of.get(key)) is None else self._named(block)

    def _named(self, block: int) -> NamedBlock:
        place = self.place_of[block]
        return NamedBlock(block, place.parent, place.key)

    def match(self, keys: Iterable[BlockKey]) -> list[int]:
        blocks: list[int] = []
        for key in keys:
            if (block := self._block_of.get(key)) is None or not self._is_named(block):
                break
            blocks.append(block)
        return blocks

    def is_filled(self, block: int, name: BlockKey) -> bool:
        """Return whether the block is known to hold the KV of this name."""
        return self._block_of.get(name) == block

    def has_name(self, parent: BlockKey, key: BlockKey, block: int) -> bool:
        """Return whether `block` is known to hold the KV of `key`."""
        place = self.place_of.get(block)
        return place is not None and (place.parent, place.key) == (parent, key)

    def is_cached(self, place: GroupPlace) -> bool:
        """Return whether vLLM has the block in its prefix cache under its name."""
        return bool(self._pool.blocks[place.block].block_hash == self._hash_of(place))

    def _hash_of(self, place: GroupPlace) -> Any:
        """Return vLLM's hash of a block."""
        return make_block_hash_with_group_id(self._groups.hash_of(place.of.key), place.of.group)

    def filled(self, place: GroupPlace) -> bool:
        """Record that a block holds the KV of its name; return False when it was known already."""
        if self.has_name(place.parent, place.key, place.block):
            return False
        present = self._block_of.get(place.key)
        if present is not None and self._is_named(present):
            return True  # a duplicate, which stays private to its holder
        self._block_of[place.key] = place.block
        self.place_of[place.block] = place
        if place.of.group == self._groups.chain_group:
            self._events.append(Stored(place.parent, (place.key,)))
        if self._boundaries is not None:
            self._events += announced(self._boundaries.add(place.of))
        return True

    def publish_at(self, places: Sequence[GroupPlace]) -> None:
        """Name held blocks that arrived from elsewhere; vLLM's prefix cache gets them."""
        for place in places:
            block = self._pool.blocks[place.block]
            assert block.ref_cnt > 0
            self._pool._insert_block_hash(self._hash_of(place), block, place.of.end * self._groups.unit)
            self.filled(place)

    def resumable(self, keys: Sequence[BlockKey]) -> tuple[int, list[tuple[GroupBlock, int]]]:
        """Return the last boundary within `keys` at which a request can go on, and the blocks that it needs."""
        return self._groups.resumable(keys, self.is_filled)

    def snapshot(self) -> list[CacheEvent]:
        places = self.place_of.values()
        chain = [Stored(each.parent, (each.key,)) for each in places if each.of.group == self._groups.chain_group]
        return chain + (announced(self._boundaries.keys) if self._boundaries is not None else [])

    def oldest(self, count: int) -> list[NamedBlock]:
        """Return the named blocks among the next `count` that vLLM will reuse, in that order."""
        return [self._named(block) for block in islice(self._reused_next(), count) if block in self.place_of]

    def reused(self, block: int) -> None:
        """Process that vLLM gave the block to another owner, which has not written into it yet."""
        if (place := self._forget(block)) is not None and self.on_evict is not None:
            self.on_evict([NamedBlock(block, place.parent, place.key)])

    def _forget(self, block: int) -> GroupPlace | None:
        """Forget and return the block's place, if it has a name."""
        if (place := self.place_of.pop(block, None)) is not None:
            del self._block_of[place.key]
            if place.of.group == self._groups.chain_group:
                self._events.append(Removed((place.key,)))
            if self._boundaries is not None:
                self._events += withdrawn(self._boundaries.remove(place.of))
        return place

    def _reused_next(self) -> Iterator[int]:
        """Yield the free blocks, the next to be reused first; vLLM's own list of them would always be whole."""
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        while block is not None and block is not queue.fake_free_list_tail:
            yield block.block_id
            block = block.next_free_block

    def _is_named(self, block: int) -> bool:
        """Return whether vLLM still has the block under its name; forget the name otherwise."""
        if self.is_cached(self.place_of[block]):
            return True
        self._forget(block)
        return False

    @property
    def num_named_held(self) -> int:
        return sum(self._pool.blocks[block].ref_cnt > 0 for block in self.place_of)

    def idle_keys(self, limit: int) -> list[BlockKey]:
        idle = (key for key, block in self._block_of.items() if self._pool.blocks[block].ref_cnt == 0)
        return list(islice(idle, limit))

    def drop_idle(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Free the cached blocks of these names, and of these keys in all groups; return their names."""
        names = list(keys)
        if not self._groups.is_chain:
            names += [self._groups.name(key, group) for key in names for group in range(self._groups.num_groups)]
        idle = {key: block for key in names for block in self.match([key]) if not self._pool.blocks[block].ref_cnt}
        self._pool.evict_blocks(set(idle.values()))
        for block in idle.values():
            self._forget(block)
        return list(idle)

    # ------------------------------------------------------------------ ownership

    def reserve_with(self, hits: Sequence[int], num_new: int) -> bool:
        newly_pinned = sum(1 for block in set(hits) if self._pool.blocks[block].ref_cnt == 0)
        if int(self._pool.get_num_free_blocks()) - self._reserved - newly_pinned < num_new:
            return False
        self.acquire(hits)
        self._reserved += num_new
        return True

    def unreserve(self, count: int) -> None:
        assert 0 <= count <= self._reserved
        self._reserved -= count

    def release_reserved(self, blocks: Sequence[int]) -> None:
        """Turn held blocks into a reservation, also where vLLM has taken more than was available."""
        self.release(blocks)
        self._reserved += len(blocks)

    def allocate(self, count: int) -> list[int]:
        self.unreserve(count)
        return sorted(block.block_id for block in self._pool.get_new_blocks(count))

    def acquire(self, blocks: Iterable[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def release(self, blocks: Sequence[int]) -> None:
        assert all(self._pool.blocks[block].ref_cnt > 0 for block in blocks)
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])

    def touch(self, keys: Sequence[BlockKey]) -> None:
        is_chain = self._groups.is_chain
        blocks = self.match(keys) if is_chain else [block for _, block in self.resumable(keys)[1]]
        unused = [block for block in blocks if self._pool.blocks[block].ref_cnt == 0]
        self.acquire(unused)
        self.release(unused)  # to the end of vLLM's free queue, the tail of the chain first

    def quarantine(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self._pool.blocks[block].ref_cnt == 1
            assert block not in self.place_of
            self.quarantined.add(block)

    def unquarantine(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.quarantined.remove(block)
            self.release([block])

    def take_events(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------------ checks

    def check_integrity(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Check vLLM's records against each other and, with `holders`, against the block lists of all holders."""
        blocks = self._pool.blocks[1:]
        free = [block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()]
        assert len(free) == len(set(free)) == self._pool.get_num_free_blocks(), "a block is free twice"
        unused = {block.block_id for block in blocks if block.ref_cnt == 0}
        assert unused == set(free), "blocks without a holder and free blocks disagree"
        assert all(block.ref_cnt >= 0 for block in blocks)
        assert {block: key for key, block in self._block_of.items()} == {
            block: place.key for block, place in self.place_of.items()
        }, "names and blocks disagree"
        assert not set(self.place_of) & self.quarantined, "a quarantined block has a name"
        if holders is not None:
            claimed = Counter(block for held in [*holders, list(self.quarantined)] for block in held)
            counts = {block.block_id: block.ref_cnt for block in blocks if block.ref_cnt}
            assert dict(claimed) == counts, f"claimed {dict(claimed)}, counted {counts}"
