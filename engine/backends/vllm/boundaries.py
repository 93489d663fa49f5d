"""Boundaries of chains at which a request can go on here, of a model with several KV groups.

A boundary needs the last blocks of each window and one state; `KvGroups.tails` says how many. Groups that need the same
are one class: a class has a block of a chain when all its groups have it. When a class gains or loses a block, the
boundaries that could need it are this block and as many after it as a boundary needs, less one.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from engine.block_keys import BlockKey
from engine.kv.course import GroupBlock


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
        """Class of each group beside the chain group."""
        for members, count in tails:
            self._tails |= dict.fromkeys(members, _Tails(len(members), count))
        self._classes = list(dict.fromkeys(self._tails.values()))
        self.keys: set[BlockKey] = set()
        """Keys at which a request can go on, where the chain before them is held."""

    def add(self, block: GroupBlock) -> list[BlockKey]:
        """Record a block; return the boundaries that became resumable by it."""
        tails = self._tails[block.group]
        if not tails.add(block):
            return []
        new = [key for key in tails.near(block.key) if key not in self.keys and self._is_resumable(key)]
        self.keys.update(new)
        return new

    def remove(self, block: GroupBlock) -> list[BlockKey]:
        """Forget a block; return the boundaries that were resumable with it."""
        tails = self._tails[block.group]
        near = list(tails.near(block.key))
        if not tails.remove(block):
            return []
        gone = [key for key in near if key in self.keys]
        self.keys.difference_update(gone)
        return gone

    def _is_resumable(self, key: BlockKey) -> bool:
        return all(tails.is_whole(key) for tails in self._classes)
