"""Pins: cached prefixes that stay in the pool until a time, whatever else arrives.

A pin holds one reference on each of its blocks, so no other request takes them. It gives way in two cases: to running
requests that lack blocks, before any of these is preempted, and to a request that does not fit beside the pins of an
engine that serves nothing else. A later request that pins the same prompt is told.

Bounds: all pins together hold at most SHARE of the pool, and those of one tenant half of that. Of a prefix that does
not fit, leading blocks are pinned. A block that several tenants pin counts for the first of them.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcache.block_keys import BlockKey
from kvcache.pool import KvPool

SHARE = 0.5
"""Largest share of the pool's blocks that may be pinned."""
TENANT_PART = 2
"""Largest part of these for one tenant, one half."""
MAX_REMEMBERED = 1 << 16
"""Largest number of blocks of which it is remembered that their pins gave way."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Request to keep a prompt's blocks."""

    seconds: float
    tenant: str = ""


class PinnedPrompt(NamedTuple):
    """Blocks of a prompt that are pinned now, and those whose earlier pins gave way."""

    pinned: int
    gave_way: int


@dataclass(slots=True)
class _Pin:
    block: int
    tenant: str
    until: float


class Pins:
    """Pinned blocks of one pool, by key."""

    def __init__(self, pool: KvPool, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._pins: dict[BlockKey, _Pin] = {}
        self._of_tenant: Counter[str] = Counter()
        self._next_end = math.inf
        """Time before which no pin ends."""
        self.max_blocks = int(pool.num_blocks * SHARE)
        self.num_gave_way = 0
        """Blocks whose pins gave way since the start."""
        self._gave_way: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def blocks(self) -> list[int]:
        """Pinned blocks, on each of which a pin holds one reference."""
        return [pin.block for pin in self._pins.values()]

    @property
    def num_idle(self) -> int:
        """Number of pinned blocks that nothing else holds."""
        return sum(self._pool.num_refs(pin.block) == 1 for pin in self._pins.values())

    def pin(self, keys: Sequence[BlockKey], retention: Retention) -> PinnedPrompt:
        """Pin the blocks of a chain from its head; old pins of equal keys count as pinned.

        A block that nobody holds ends the run where all such blocks are reserved.
        """
        gave_way = [key for key in keys if key in self._gave_way]
        for key in gave_way:
            del self._gave_way[key]
        return PinnedPrompt(self._pin(keys, retention), len(gave_way))

    def _pin(self, keys: Sequence[BlockKey], retention: Retention) -> int:
        until = self._clock() + retention.seconds
        limit = self.max_blocks // TENANT_PART
        for at, key in enumerate(keys):
            if (present := self._pins.get(key)) is not None:
                present.until = max(present.until, until)
                continue
            place = self._pool.named(key)
            if place is None or (not self._pool.num_refs(place.block) and self._pool.num_available <= 0):
                return at
            if len(self._pins) >= self.max_blocks or self._of_tenant[retention.tenant] >= limit:
                return at
            self._pool.acquire([place.block])
            self._pins[key] = _Pin(place.block, retention.tenant, until)
            self._of_tenant[retention.tenant] += 1
            self._next_end = min(self._next_end, until)
        return len(keys)

    def expire(self) -> None:
        """Drop pins whose time is over."""
        if (now := self._clock()) < self._next_end:
            return
        self._drop([key for key, pin in self._pins.items() if pin.until <= now])
        self._next_end = min((pin.until for pin in self._pins.values()), default=math.inf)

    def give_way(self, num_blocks: int) -> bool:
        """Drop pins, those that end first, until `num_blocks` are available; return whether they are.

        Only where nothing but pins holds or has reserved blocks.
        """
        pool = self._pool
        if not self._pins or pool.num_reserved or pool.num_held != len(self._pins):
            return False
        by_end = sorted(self._pins, key=lambda key: self._pins[key].until)
        missing = num_blocks - pool.num_available
        if missing > 0:
            self._yield(by_end[:missing])
        return pool.num_available >= num_blocks

    def shrink(self, count: int) -> bool:
        """Drop up to `count` pinned blocks that nothing else holds, for running requests that lack blocks.

        Those that end first go first; return whether any was dropped.
        """
        idle = [key for key, pin in self._pins.items() if self._pool.num_refs(pin.block) == 1]
        self._yield(sorted(idle, key=lambda key: self._pins[key].until)[:count])
        return bool(idle)

    def by_tenant(self) -> list[tuple[str, int, float]]:
        """Return tenant, number of blocks, and seconds until the last of them ends."""
        ends: dict[str, float] = {}
        for pin in self._pins.values():
            ends[pin.tenant] = max(ends.get(pin.tenant, 0.0), pin.until)
        now = self._clock()
        return [(tenant, self._of_tenant[tenant], max(0.0, until - now)) for tenant, until in sorted(ends.items())]

    def clear(self, tenant: str | None = None) -> int:
        """Drop the pins of a tenant, or all; return their number."""
        gone = [key for key, pin in self._pins.items() if tenant in (None, pin.tenant)]
        self._drop(gone)
        return len(gone)

    def check_integrity(self) -> None:
        """Check all records.

        Raises AssertionError when they disagree.
        """
        assert Counter(pin.tenant for pin in self._pins.values()) == +self._of_tenant, "a tenant's pins are miscounted"
        for key, pin in self._pins.items():
            assert self._pool.match([key]) == [pin.block], "a pinned block has lost its name"

    def _yield(self, keys: Sequence[BlockKey]) -> None:
        """Drop pins before their time, and remember it."""
        self._drop(keys)
        self.num_gave_way += len(keys)
        self._gave_way.update(dict.fromkeys(keys))
        while len(self._gave_way) > MAX_REMEMBERED:
            self._gave_way.popitem(last=False)

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        gone = [self._pins.pop(key) for key in keys]
        self._of_tenant.subtract(pin.tenant for pin in gone)
        if gone:
            self._pool.release([pin.block for pin in gone])
