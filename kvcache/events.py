"""Changes of what a worker has cached, as its routers read them."""

from collections.abc import Iterable
from typing import NamedTuple

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
