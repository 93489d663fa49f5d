"""The block pool: ownership of KV blocks, and the prefix cache.

Every block is in exactly one of four states:

    free ──allocate──▶ held ──release──▶ free     (if it has no name)
      ▲                 │  ▲ ╲
      │              release acquire ──quarantine──▶ quarantined ──unquarantine──▶ free
    evict (in allocate) ▼  │
      └────────────── cached                      (if it has one)

*held* blocks have a reference count; *cached* ones have a name, count zero, and are evicted oldest first. *Quarantined*
blocks have no owner, but a read that cannot be stopped may still write into them.

Blocks are reserved before they are used: `reserve_with` sets blocks aside, so a request that started never runs out of
them. `free + cached >= reserved` always holds.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvcache.block_keys import BlockKey
from kvcache.pool import CacheEvent, NamedBlock, Removed, Stored


class BlockPool:
    """Reference counts, prefix cache and reservations over `num_blocks` blocks.

    Not thread-safe.
    """

    on_evict: Callable[[list[NamedBlock]], None] | None = None
    """Function that is called before evicted blocks get another owner."""

    def __init__(self, num_blocks: int) -> None:
        """Create a pool of free blocks."""
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._refs: list[int] = [0] * num_blocks
        self.quarantined: set[int] = set()
        """Blocks that an unfinished read may still write into."""
        self.name_of: dict[int, tuple[BlockKey, BlockKey]] = {}
        """Parent and key of each named block."""
        self._block_of: dict[BlockKey, int] = {}
        self._reserved = 0
        self._events: list[CacheEvent] = []

    @property
    def num_ids(self) -> int:
        """One more than the largest block id."""
        return self.num_blocks

    @property
    def num_available(self) -> int:
        """Number of blocks that a new reservation could get."""
        return len(self._free) + len(self._cached) - self._reserved

    @property
    def num_filled(self) -> int:
        """Number of blocks that are not free."""
        return self.num_blocks - len(self._free)

    @property
    def num_held(self) -> int:
        """Number of blocks with at least one reference."""
        return self.num_blocks - len(self._free) - len(self._cached) - len(self.quarantined)

    @property
    def num_reserved(self) -> int:
        """Number of blocks reserved and not allocated yet."""
        return self._reserved

    @property
    def num_quarantined(self) -> int:
        """Number of blocks that an unfinished read may still write into."""
        return len(self.quarantined)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._block_of

    def num_refs(self, block: int) -> int:
        """Return the number of references on a block."""
        return self._refs[block]

    def oldest(self, count: int) -> list[NamedBlock]:
        """Return at most `count` cached blocks, the next to be evicted first."""
        return [NamedBlock(block, *self.name_of[block]) for block in islice(self._cached, count)]

    def named(self, key: BlockKey) -> NamedBlock | None:
        """Return the block of this name with its parent's, or None."""
        block = self._block_of.get(key)
        return None if block is None else NamedBlock(block, *self.name_of[block])

    def match(self, keys: Iterable[BlockKey]) -> list[int]:
        """Return the blocks of the longest cached prefix of `keys`, without taking references."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def reserve_with(self, hits: Sequence[int], num_new: int) -> bool:
        """Take a reference on each of `hits` and reserve `num_new` more blocks, or return False and do nothing."""
        newly_pinned = sum(1 for block in set(hits) if self._refs[block] == 0)
        if self.num_available - newly_pinned < num_new:
            return False
        self.acquire(hits)
        self._reserved += num_new
        return True

    def could_reserve_without(
        self, holders: Iterable[Sequence[int]], num_reserved: int, hits: Sequence[int], num_new: int
    ) -> bool:
        """Return whether `reserve_with` would succeed without `holders` and a reservation of `num_reserved`."""
        dropped = Counter(block for blocks in holders for block in blocks)
        freed = sum(1 for block, count in dropped.items() if self._refs[block] == count)
        pinned = sum(1 for block in set(hits) if self._refs[block] == dropped[block])
        return self.num_available + num_reserved + freed - pinned >= num_new

    def unreserve(self, count: int) -> None:
        """Give back a reservation of `count` blocks."""
        assert 0 <= count <= self._reserved
        self._reserved -= count

    def allocate(self, count: int) -> list[int]:
        """Turn `count` reserved blocks into held ones with one reference each, evicting when nothing is free."""
        assert 0 <= count <= self._reserved
        self._reserved -= count
        num_free = min(count, len(self._free))
        blocks = [self._free.popleft() for _ in range(num_free)]
        if num_free < count:
            blocks += self._evict(count - num_free)
        for block in blocks:
            self._refs[block] = 1
        blocks.sort()  # neighbours in the pool are read as one span
        return blocks

    def _evict(self, count: int) -> list[int]:
        """Return the oldest cached blocks, now without names."""
        blocks = [self._cached.popitem(last=False)[0] for _ in range(count)]
        names = [self.name_of.pop(block) for block in blocks]
        for _, key in names:
            del self._block_of[key]
        if self.on_evict is not None:
            self.on_evict([NamedBlock(block, *name) for block, name in zip(blocks, names, strict=True)])
        self._events.append(Removed(tuple(key for _, key in names)))
        return blocks

    @property
    def num_named_held(self) -> int:
        """Number of blocks with a name and at least one reference."""
        return len(self.name_of) - len(self._cached)

    def idle_keys(self, limit: int) -> list[BlockKey]:
        """Return the names of at most `limit` cached blocks."""
        return [self.name_of[block][1] for block in islice(self._cached, limit)]

    def drop_idle(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Free the cached blocks of these names, of which `on_evict` is not told; return their names."""
        dropped: list[BlockKey] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None or self._refs[block]:
                continue
            del self._block_of[key], self.name_of[block], self._cached[block]
            self._free.append(block)
            dropped.append(key)
        if dropped:
            self._events.append(Removed(tuple(dropped)))
        return dropped

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, held or cached."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block of a chain, given from its head.

        Walks from the tail, so the tail of a chain is evicted before its head.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} is not held"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self.name_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Make the cached blocks of a chain, given from its head, the last to be evicted, its tail before its head.

        For chains whose references were dropped range by range: otherwise the head would go first, and the blocks
        behind it would be cached and never found.
        """
        for key in reversed(keys):
            block = self._block_of.get(key)
            if block is not None and block in self._cached:
                self._cached.move_to_end(block)

    def publish(self, parent: BlockKey, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        """Name held, full, immutable blocks: a chain that follows `parent`.

        A name that another block already has stays with that block; the newcomer stays private to its holder.
        """
        run_parent = parent
        run: list[BlockKey] = []
        for key, block in zip(keys, blocks, strict=True):
            assert self._refs[block] > 0, f"block {block} is not held"
            if key in self._block_of:
                self._stored(run_parent, run)
                run_parent, run = key, []
            else:
                self._block_of[key] = block
                self.name_of[block] = (parent, key)
                run.append(key)
            parent = key
        self._stored(run_parent, run)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Set aside unnamed blocks with one reference; they have no owner until `unquarantine`."""
        for block in blocks:
            assert self._refs[block] == 1
            assert block not in self.name_of
            self._refs[block] = 0
            self.quarantined.add(block)

    def unquarantine(self, blocks: Iterable[int]) -> None:
        """Free blocks whose read is quiet."""
        for block in blocks:
            self.quarantined.remove(block)
            self._free.append(block)

    def take_events(self) -> list[CacheEvent]:
        """Return the changes of the prefix cache since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[CacheEvent]:
        """Return the whole prefix cache as events, for a reader that lost some."""
        return [Stored(parent, (key,)) for parent, key in self.name_of.values()]

    def check_integrity(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Check all records.

        Raises AssertionError when they disagree.

        With `holders`, the block lists of all owners of references, also check that they add up to the counts.
        """
        free, cached = set(self._free), set(self._cached)
        held = {block for block, refs in enumerate(self._refs) if refs > 0}
        states = [free, cached, held, self.quarantined]
        assert len(free) == len(self._free), "a block is free twice"
        assert sum(map(len, states)) == self.num_blocks, "a block is in no state, or in two"
        assert set().union(*states) == set(range(self.num_blocks)), "a block is lost"
        assert all(refs >= 0 for refs in self._refs)
        assert 0 <= self._reserved <= len(free) + len(cached), "more is reserved than there is"
        assert cached <= set(self.name_of), "a cached block has no name"
        assert not set(self.name_of) & (free | self.quarantined), "a free block has a name"
        assert {block: key for key, block in self._block_of.items()} == {
            block: key for block, (_, key) in self.name_of.items()
        }, "names and blocks disagree"
        if holders is not None:
            claimed = Counter(block for blocks in holders for block in blocks)
            counts = {block: refs for block, refs in enumerate(self._refs) if refs}
            assert claimed == counts, f"claimed {dict(claimed)}, counted {counts}"

    def _stored(self, parent: BlockKey, run: list[BlockKey]) -> None:
        if run:
            self._events.append(Stored(parent, tuple(run)))
