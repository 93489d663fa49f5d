"""Protocol of a pool of KV blocks, as loans, pins and stores use it. Each engine has a pool of its own.

Changes of what a worker has cached, as its routers read them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from kvcache.block_keys import BlockKey


class Stored(NamedTuple):
    """Event: `keys` became cached.

    The first follows `parent`; each is the parent of the next.
    """

    parent: BlockKey
    keys: tuple[BlockKey, ...]
    shared: bool = False
    """Whether the store that workers share has them, instead of this worker."""


class Removed(NamedTuple):
    """Event: `keys` are no longer cached."""

    keys: tuple[BlockKey, ...]
    shared: bool = False
    """Whether they left the store that workers share, instead of this worker."""


CacheEvent = Stored | Removed


class MergedEvents:
    """Events of the pool and of the local store below it as those of one cache.

    A name that left one of them is removed only when the other does not have it either.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockKey, set[str]] = {}

    def of(self, holder: str, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        """Return what the events of one holder, in order, change of the whole."""
        return [merged for event in events if (merged := self._merged(holder, event)) is not None]

    def _merged(self, holder: str, event: CacheEvent) -> CacheEvent | None:
        if isinstance(event, Stored):
            for key in event.keys:
                self._holders.setdefault(key, set()).add(holder)
            return event
        gone = []
        for key in event.keys:
            holders = self._holders.get(key, set())
            holders.discard(holder)
            if not holders:
                self._holders.pop(key, None)
                gone.append(key)
        return Removed(tuple(gone)) if gone else None


class NamedBlock(NamedTuple):
    """A block of the pool and its name."""

    block: int
    parent: BlockKey
    key: BlockKey


class KvPool(Protocol):
    """Blocks by number: who holds them, which are reserved, and what the cached ones are named.

    Blocks with references are *held*. A reservation is a number of blocks that will be allocated later.
    """

    num_blocks: int
    on_evict: Callable[[list[NamedBlock]], None] | None
    """Function that is called before evicted blocks get another owner."""

    @property
    def num_ids(self) -> int:
        """One more than the largest block id."""

    @property
    def num_available(self) -> int:
        """Number of blocks that a new reservation could get."""

    @property
    def num_filled(self) -> int:
        """Number of blocks that are not free."""

    @property
    def num_held(self) -> int:
        """Number of blocks with at least one reference."""

    @property
    def num_named_held(self) -> int:
        """Number of blocks with a name and at least one reference."""

    @property
    def num_reserved(self) -> int:
        """Number of blocks reserved and not allocated yet."""

    @property
    def quarantined(self) -> Collection[int]:
        """Blocks that an unfinished read may still write into."""

    @property
    def num_quarantined(self) -> int:
        """Number of blocks that an unfinished read may still write into."""

    def __contains__(self, key: BlockKey) -> bool: ...

    def num_refs(self, block: int) -> int:
        """Return the number of references on a block."""

    def match(self, keys: Iterable[BlockKey]) -> list[int]:
        """Return the blocks of the longest cached prefix of `keys`, without taking references."""

    def named(self, key: BlockKey) -> NamedBlock | None:
        """Return the block of this name with its parent's, or None."""

    def oldest(self, count: int) -> list[NamedBlock]:
        """Return at most `count` cached blocks, the next to be evicted first."""

    def reserve_with(self, hits: Sequence[int], num_new: int) -> bool:
        """Take a reference on each of `hits` and reserve `num_new` more blocks, or return False and do nothing."""

    def unreserve(self, count: int) -> None:
        """Give back a reservation of `count` blocks."""

    def allocate(self, count: int) -> list[int]:
        """Turn `count` reserved blocks into held ones with one reference each, evicting when nothing is free."""

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, held or cached."""

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block of a chain, given from its head; its tail is evicted first."""

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Make the cached blocks of a chain, given from its head, the last to be evicted, its tail before its head."""

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Set aside unnamed blocks with one reference; they have no owner until `unquarantine`."""

    def unquarantine(self, blocks: Iterable[int]) -> None:
        """Free blocks whose read is quiet."""

    def idle_keys(self, limit: int) -> list[BlockKey]:
        """Return the names of at most `limit` cached blocks without references."""

    def drop_idle(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Free the cached blocks of these names, of which `on_evict` is not told; return their names."""

    def take_events(self) -> list[CacheEvent]:
        """Return the changes of the prefix cache since the last call, in order."""

    def snapshot(self) -> list[CacheEvent]:
        """Return the whole prefix cache as events, for a reader that lost some."""

    def check_integrity(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Check all records, with `holders` also the reference counts against the block lists of all owners.

        Raises AssertionError when they disagree.
        """
