"""Named blocks of a pool, of whichever engine.

With them come their fingerprints, the pins, the stores below the pool, the changes that routers are told, and the
statistics of lookups.

Restore or recompute: measured speeds of computing prompts and of restoring blocks, and how often a lookup pays.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.block_keys import BlockKey
from kvcache.kv_stats import KvStats
from kvcache.layout import KvLayout
from kvcache.pins import Pins
from kvcache.pool import CacheEvent, KvPool, MergedEvents, NamedBlock
from kvcache.store.kv_store import KvStore

WEIGHT = 0.2
"""Weight of the newest measurement in the running mean."""
MIN_TOKENS = 64
"""Smallest number of prompt tokens of a step that is measured."""
EXPLORE_EVERY = 16
"""Number of lookups that do not seem worth it, of which one is made to learn."""
FORGIVENESS = 1.02
"""Growth of the assumed restore rate each time it is not used, so that it is tried again."""


@dataclass(slots=True)
class RestorePolicy:
    """Running means of both speeds.

    A speed that was never measured is assumed to favour restoring.
    """

    prefill_tokens_per_s: float | None = None
    restored_bytes_per_s: float | None = None
    prompt_step_s: float = 0.0
    """Seconds of a step with prompt tokens."""

    def computed(self, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step that computed so many prompt tokens, and perhaps a few others."""
        if prompt_tokens >= MIN_TOKENS and seconds > 0:
            self.prompt_step_s = _mean(self.prompt_step_s or None, seconds)
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, prompt_tokens / seconds)

    def restored(self, num_bytes: int, seconds: float) -> None:
        """Learn from a restore: bytes read from a store, verified and bound."""
        if num_bytes and seconds > 0:
            self.restored_bytes_per_s = _mean(self.restored_bytes_per_s, num_bytes / seconds)

    def worth_restoring(self, num_tokens: int, num_bytes: int) -> bool:
        """Return whether restoring is faster than computing, by the measured speeds."""
        if not num_tokens:
            return False
        if self.prefill_tokens_per_s is None or self.restored_bytes_per_s is None:
            return True
        if num_bytes / self.restored_bytes_per_s <= num_tokens / self.prefill_tokens_per_s:
            return True
        self.restored_bytes_per_s *= FORGIVENESS
        return False


@dataclass(slots=True)
class LookupPolicy:
    """Whether to look a prompt up in a place that does not say beforehand what it holds.

    A lookup delays a request even where nothing is found. It starts optimistic, and tries again now and then.
    """

    found_share: float = 1.0
    """Running mean of the share of looked-up blocks that were found."""
    lookup_s: float = 0.0
    _skipped: int = 0

    def worth_looking(self, num_tokens: int, speeds: RestorePolicy) -> bool:
        """Return whether a lookup is expected to save more time than it takes.

        It takes its own time, and on average half of a step for which the request comes too late.
        """
        if speeds.prefill_tokens_per_s is None:
            return True
        saved_s = self.found_share * num_tokens / speeds.prefill_tokens_per_s
        if saved_s > self.lookup_s + speeds.prompt_step_s / 2:
            return True
        self._skipped += 1
        if self._skipped < EXPLORE_EVERY:
            return False
        self._skipped = 0
        return True

    def looked(self, num_wanted: int, num_found: int, seconds: float) -> None:
        """Learn from a lookup of `num_wanted` blocks."""
        self.found_share = _mean(self.found_share, num_found / num_wanted)
        self.lookup_s = _mean(self.lookup_s or None, seconds)


def _mean(before: float | None, measured: float) -> float:
    return measured if before is None else before + WEIGHT * (measured - before)


WRITE_BEHIND_S = 0.05
"""Seconds between two looks at the blocks that will be evicted next."""
BEHIND_PART = 4
"""Part of the pool, one quarter, whose blocks are written to the stores before they are evicted."""
MAX_BEHIND = 2048
"""Largest number of such blocks, since each look takes a tenth of a microsecond for each."""


class Translator(Protocol):
    """Reader of a store's events, for models whose blocks are not one chain."""

    def translated(self, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        """Return what the store's events say of chains and of their boundaries."""

    def snapshot(self) -> list[CacheEvent]:
        """Return all that they have said so far, and that still holds."""


class BlockMemory(Protocol):
    """Access to the bytes of the pool's blocks.

    Its methods may be called on any thread.
    """

    def fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """Return the fingerprints of the blocks' present bytes, [len(blocks), kv_heads]."""

    def read_blocks(self, blocks: Sequence[int]) -> Iterable[NDArray[np.uint8]]:
        """Return the bytes of whole blocks, [block_bytes] each; each valid until the next is asked for.

        With several ranks only on the loop's thread.
        """

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        """Set the bytes of a block; with several ranks, this process's part of them."""


@dataclass(eq=False, slots=True)
class StoreBelow:
    """A store below the pool, and what this engine has learned of its speed."""

    store: KvStore
    translator: Translator | None = None
    speeds: RestorePolicy = field(default_factory=RestorePolicy)
    lookups: LookupPolicy = field(default_factory=LookupPolicy)

    def take_events(self) -> list[CacheEvent]:
        events = self.store.take_events()
        return events if self.translator is None else self.translator.translated(events)

    def snapshot(self) -> list[CacheEvent]:
        return self.store.snapshot() if self.translator is None else self.translator.snapshot()


class CachedBlocks:
    """Named blocks of one pool.

    Every named block has a fingerprint, taken where and when the block became full.
    """

    def __init__(
        self,
        pool: KvPool,
        layout: KvLayout,
        memory: BlockMemory,
        clock: Callable[[], float] = time.monotonic,
        stores: Sequence[StoreBelow] = (),
    ) -> None:
        """Create it over the pool's `memory`.

        Evicted blocks go to the `stores`, the local one first, and come back where that is faster than computing.
        `clock` returns seconds.
        """
        self.pool = pool
        self.layout = layout
        self.clock = clock
        self.pins = Pins(pool, clock)
        self.counts = KvStats()
        self.speeds = RestorePolicy()
        """Speed of computing prompts."""
        self.stores = tuple(stores)
        self.local = next((below for below in stores if below.store.is_local), None)
        """Store of this host."""
        self.shared = next((below for below in stores if not below.store.is_local), None)
        """Store that workers share."""
        self.compute_fingerprints = memory.fingerprints
        self.write_block = memory.write_block
        self.memory = memory
        self._fingerprints = np.zeros((pool.num_ids, layout.kv_heads), np.uint64)
        self._merged = MergedEvents()
        self._write_behind_at = 0.0
        if self.stores:
            pool.on_evict = self._evicted

    def fingerprints_of(self, blocks: Sequence[int]) -> bytes:
        """Return the fingerprints taken when the blocks became full, uint64 [len(blocks), kv_heads]."""
        return self._fingerprints[list(blocks)].tobytes()

    def set_fingerprints(self, blocks: Sequence[int], fingerprints: NDArray[np.uint64]) -> None:
        """Record the fingerprints of full blocks, [len(blocks), kv_heads]."""
        self._fingerprints[list(blocks)] = fingerprints

    def became_full(self, blocks: Sequence[NamedBlock]) -> None:
        """Process blocks that were computed and named: a store may get them at once."""
        self._put(blocks, [below.store for below in self.stores if below.store.writes_at_once])

    def worth_restoring(self, below: StoreBelow, num_blocks: int) -> bool:
        """Return whether reading so many blocks from a store is faster than computing them."""
        below.speeds.prefill_tokens_per_s = self.speeds.prefill_tokens_per_s
        tokens = num_blocks * self.layout.block_tokens
        return below.speeds.worth_restoring(tokens, num_blocks * self.layout.block_bytes)

    def num_restorable(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks the local store has, if restoring them is faster than computing them."""
        if (below := self.local) is None:
            return 0
        count = below.store.num_known(keys)
        return count if self.worth_restoring(below, count) else 0

    def share(self, keys: Sequence[BlockKey]) -> int:
        """Give the blocks of these names to the shared store; return how many it has then, or is being given."""
        if (below := self.shared) is None:
            return 0
        self._put([block for key in keys if (block := self.pool.named(key)) is not None], [below.store])
        return sum(not below.store.lacks(key) for key in keys)

    @property
    def num_available(self) -> int:
        """Number of blocks for a new request: pins of an engine that serves nothing else give way."""
        pool = self.pool
        idle = not pool.num_reserved and pool.num_held == len(self.pins)
        return pool.num_available + (pool.num_held if idle else 0)

    def take_events(self) -> list[CacheEvent]:
        """Return changes since the last call of the blocks held here, in the pool or a store."""
        events = self.pool.take_events()
        if self.local is not None:
            events = self._merged.of("pool", events)
        for below in self.stores:
            changes = below.take_events()
            events += self._merged.of("local", changes) if below.store.is_local else changes
        return events

    def snapshot(self) -> list[CacheEvent]:
        """Return all blocks held here as events."""
        below = self.local
        return self.pool.snapshot() + ([] if below is None else below.snapshot())

    def write_behind(self) -> None:
        """Put the blocks that will be evicted next, since an eviction must not wait for a store."""
        stores = [below.store for below in self.stores]
        if not stores or (now := self.clock()) < self._write_behind_at:
            return
        room = min(store.num_writable for store in stores)
        if not room:
            return
        self._write_behind_at = now + WRITE_BEHIND_S
        count = min(MAX_BEHIND, self.pool.num_blocks // BEHIND_PART)
        self._put(self._with_ancestors(self.pool.oldest(count), room)[:room], stores)

    def close(self) -> None:
        """Write what is queued for the stores, within bounds, and close them."""
        for below in self.stores:
            below.store.close()

    def _evicted(self, blocks: list[NamedBlock]) -> None:
        self._put(self._with_ancestors(blocks), [below.store for below in self.stores])

    def _with_ancestors(self, blocks: Iterable[NamedBlock], enough: float = math.inf) -> list[NamedBlock]:
        """Return blocks that a store lacks, each behind those before it in its chain that the pool still has.

        A chain is evicted from its tail, and a tail in a store is of no use without its head. The search ends when
        `enough` are found.
        """
        chosen: dict[NamedBlock, None] = {}
        for each in blocks:
            chain: list[NamedBlock] = []
            block: NamedBlock | None = each
            while block is not None and block not in chosen and self._is_lacking(block.key):
                chain.append(block)
                block = self.pool.named(block.parent)
            chosen.update(dict.fromkeys(reversed(chain)))
            if len(chosen) >= enough:
                break
        return list(chosen)

    def _is_lacking(self, key: BlockKey) -> bool:
        return any(below.store.lacks(key) for below in self.stores)

    def _put(self, blocks: Sequence[NamedBlock], stores: Sequence[KvStore]) -> None:
        """Put named blocks into those of the stores that lack them, as far as this engine knows."""
        takers: dict[NamedBlock, list[KvStore]] = {}
        for store in stores:
            lacking = [each for each in blocks if store.lacks(each.key)]
            if (surplus := len(lacking) - store.num_writable) > 0:
                store.drop(surplus)
                lacking = lacking[:-surplus]
            for each in lacking:
                takers.setdefault(each, []).append(store)
        if not takers:  # a read of no blocks would still wait for a GPU
            return
        contents = self.memory.read_blocks([each.block for each in takers])
        for (each, its_stores), content in zip(takers.items(), contents, strict=True):
            for store in its_stores:
                store.put(each.parent, each.key, content, self.fingerprints_of([each.block]))
