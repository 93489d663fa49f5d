"""Pins: cached prefixes that stay in the pool until a time, whatever else arrives.

A pin holds one reference on each of its blocks, so no other request takes them. It gives way in two cases: to a request
that does not fit beside the pins of an engine that serves nothing else, and to running requests that lack blocks when
there is nobody left to preempt. Both would wait for ever otherwise.

Bounds: all pins together hold at most SHARE of the pool, and those of one tenant half of that. Of a prefix that does
not fit, leading blocks are pinned. A block that several tenants pin counts for the first of them.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.block_keys import BlockKey
from engine.kv.block_pool import BlockPool

SHARE = 0.5
"""Largest share of the pool's blocks that may be pinned."""
TENANT_PART = 2
"""Largest part of these for one tenant, one half."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Request to keep a prompt's blocks."""

    seconds: float
    tenant: str = ""


@dataclass(slots=True)
class _Pin:
    block: int
    tenant: str
    until: float


class Pins:
    """Pinned blocks of one pool, by key."""

    def __init__(self, pool: BlockPool, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._pins: dict[BlockKey, _Pin] = {}
        self._of_tenant: Counter[str] = Counter()
        self._next_end = math.inf
        """Time before which no pin ends."""
        self.max_blocks = int(pool.num_blocks * SHARE)

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

    def pin(self, keys: Sequence[BlockKey], retention: Retention) -> int:
        """Pin the blocks of a chain from its head; return how many are pinned, old pins of equal keys included.

        A block that nobody holds ends the run: others may count on its room.
        """
        until = self._clock() + retention.seconds
        limit = self.max_blocks // TENANT_PART
        for at, key in enumerate(keys):
            if (present := self._pins.get(key)) is not None:
                present.until = max(present.until, until)
                continue
            place = self._pool.named(key)
            if place is None or not self._pool.num_refs(block := place.block):
                return at
            if len(self._pins) >= self.max_blocks or self._of_tenant[retention.tenant] >= limit:
                return at
            self._pool.acquire([block])
            self._pins[key] = _Pin(block, retention.tenant, until)
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
            self._drop(by_end[:missing])
        return pool.num_available >= num_blocks

    def shrink(self, count: int) -> bool:
        """Drop up to `count` pinned blocks that nothing else holds, for requests that can only go on so.

        Those that end first go first; return whether any was dropped.
        """
        idle = [key for key, pin in self._pins.items() if self._pool.num_refs(pin.block) == 1]
        self._drop(sorted(idle, key=lambda key: self._pins[key].until)[:count])
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

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        gone = [self._pins.pop(key) for key in keys]
        self._of_tenant.subtract(pin.tenant for pin in gone)
        if gone:
            self._pool.release([pin.block for pin in gone])
