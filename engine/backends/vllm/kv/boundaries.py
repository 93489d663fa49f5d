"""Boundaries of chains at which a request can go on here, of a model with several KV groups.

A boundary needs the last blocks of each window and one state; `KvGroups.tails` says how many. Groups that need the same
are one class: a class has a block of a chain when all its groups have it. When a class gains or loses a block, the
boundaries that could need it are this block and as many after it as a boundary needs, less one.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from kvcache.block_keys import BlockKey, resume_name
from kvcache.chain import GroupBlock, name_of
from kvcache.pool import CacheEvent, Removed, Stored


class _Tails:
    """Blocks of one class."""

    def __init__(self, num_groups: int, count: int) -> None:
        self._num_groups, self._count = num_groups, count
        self._held: defaultdict[BlockKey, int] = defaultdict(int)
        """Number of groups that have the block which ends at a key."""
        self._before: dict[BlockKey, BlockKey] = {}
        self._after: defaultdict[BlockKey, set[BlockKey]] = defaultdict(set)

    def add(self, block: GroupBlock) -> bool:
        """Record a block of one of the groups; return whether all have it now."""
        self._held[block.key] += 1
        if self._held[block.key] < self._num_groups:
            return False
        self._before[block.key] = block.before
        self._after[block.before].add(block.key)
        return True

    def remove(self, block: GroupBlock) -> bool:
        """Forget a block of one of the groups; return whether all had it."""
        self._held[block.key] -= 1
        had_all = self._before.pop(block.key, None) is not None
        if had_all:
            self._after[block.before].discard(block.key)
            if not self._after[block.before]:
                del self._after[block.before]
        if not self._held[block.key]:
            del self._held[block.key]
        return had_all

    def is_whole(self, key: BlockKey) -> bool:
        """Return whether the blocks that a boundary at this key needs are there."""
        for _ in range(self._count):
            if (before := self._before.get(key)) is None:
                return False
            if not before:
                return True
            key = before
        return True

    def near(self, key: BlockKey) -> Iterator[BlockKey]:
        """Yield the keys whose boundaries need the block that ends at `key`, itself first."""
        level = [key]
        for _ in range(self._count):
            yield from level
            level = [after for each in level for after in self._after.get(each, ())]
            if not level:
                return


class Boundaries:
    """Resumable boundaries of one pool."""

    def __init__(self, tails: Iterable[tuple[list[int], int]]) -> None:
        """Create it; `tails` are those of `KvGroups.tails`."""
        self._tails: dict[int, _Tails] = {}
        """Class of each group whose last blocks a boundary needs."""
        for members, count in tails:
            self._tails |= dict.fromkeys(members, _Tails(len(members), count))
        self._classes = list(dict.fromkeys(self._tails.values()))
        self.keys: set[BlockKey] = set()
        """Keys at which a request can go on, where the chain before them is held."""

    def add(self, block: GroupBlock) -> list[BlockKey]:
        """Record a block; return the boundaries that became resumable by it."""
        if (tails := self._tails.get(block.group)) is None or not tails.add(block):
            return []
        new = [key for key in tails.near(block.key) if key not in self.keys and self._is_resumable(key)]
        self.keys.update(new)
        return new

    def remove(self, block: GroupBlock) -> list[BlockKey]:
        """Forget a block; return the boundaries that were resumable with it."""
        if (tails := self._tails.get(block.group)) is None:
            return []
        near = list(tails.near(block.key))
        if not tails.remove(block):
            return []
        gone = [key for key in near if key in self.keys]
        self.keys.difference_update(gone)
        return gone

    def _is_resumable(self, key: BlockKey) -> bool:
        return all(tails.is_whole(key) for tails in self._classes)


def announced(keys: Iterable[BlockKey], shared: bool = False) -> list[CacheEvent]:
    """Return the events that announce boundaries."""
    return [Stored(key, (resume_name(key),), shared) for key in keys]


def withdrawn(keys: Iterable[BlockKey], shared: bool = False) -> list[CacheEvent]:
    """Return the events that withdraw boundaries."""
    names = tuple(map(resume_name, keys))
    return [Removed(names, shared)] if names else []


class StoredBoundaries:
    """Boundaries of a store, as far as this engine knows its content; implements `Translator`.

    The store knows names and parents alone. A block of the chain follows its parent; one of a window or a state has the
    chain's block that ends where it does as its parent, and the name that its group gives it.
    """

    def __init__(self, tails: Iterable[tuple[list[int], int]], widths: list[int], is_shared: bool = True) -> None:
        """Create it; `widths` are keys of a block, by group."""
        self._is_shared = is_shared
        tails = list(tails)
        self._boundaries = Boundaries(tails)
        self._groups = [group for members, _ in tails for group in members]
        self._widths = widths
        self._parents: dict[BlockKey, BlockKey] = {}
        """Parent of each block of a chain."""
        self._tails: dict[BlockKey, GroupBlock] = {}
        """Blocks of windows and states, by name."""
        self._early: defaultdict[BlockKey, dict[BlockKey, int]] = defaultdict(dict)
        """Groups of such blocks that were written before the chain's block, by its key and their name."""
        self._key_of_early: dict[BlockKey, BlockKey] = {}

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._boundaries.keys

    def snapshot(self) -> list[CacheEvent]:
        chain: list[CacheEvent] = [Stored(parent, (key,), self._is_shared) for key, parent in self._parents.items()]
        return chain + announced(self._boundaries.keys, self._is_shared)

    def translated(self, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        return [each for event in events for each in self._of(event)]

    def _of(self, event: CacheEvent) -> Iterator[CacheEvent]:
        if isinstance(event, Removed):
            for name in event.keys:
                if (tail := self._tails.pop(name, None)) is not None:
                    yield from withdrawn(self._boundaries.remove(tail), self._is_shared)
                elif (key := self._key_of_early.pop(name, None)) is not None:
                    self._early[key].pop(name, None)
                else:  # also a block that only others wrote
                    self._parents.pop(name, None)
                    yield Removed((name,), self._is_shared)
            return
        parent = event.parent
        for name in event.keys:
            group = next((group for group in self._groups if name_of(parent, group) == name), None)
            if group is None:
                self._parents[name] = parent
                yield Stored(parent, (name,), self._is_shared)
                for tail_name, its_group in self._early.pop(name, {}).items():
                    del self._key_of_early[tail_name]
                    yield from self._add(name, tail_name, its_group)
                parent = name
            elif parent in self._parents:
                yield from self._add(parent, name, group)
            else:
                self._early[parent][name] = group
                self._key_of_early[name] = parent

    def _add(self, key: BlockKey, name: BlockKey, group: int) -> list[CacheEvent]:
        """Add the block of a window or a state that ends at `key`."""
        if name in self._tails:
            return []
        tail = self._tails[name] = GroupBlock(0, group, key, name, self._before(key, self._widths[group]))
        return announced(self._boundaries.add(tail), self._is_shared)

    def _before(self, key: BlockKey, width: int) -> BlockKey:
        """Return the key so many blocks earlier in the chain; empty at its start."""
        for _ in range(width):
            key = self._parents.get(key, b"")
        return key if key in self._parents else b""
