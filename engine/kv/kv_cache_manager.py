"""The KV cache manager: reserves, names and releases the blocks of sequences.

Owns the pool and the fingerprints.
"""

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.block_keys import BlockKey, block_keys
from engine.core_types import Sequence
from engine.kv.block_pool import BlockPool, CacheEvent, NamedPlace, Removed, Stored
from engine.kv.course import Course, chain_course
from engine.kv.kv_stats import KvStats
from engine.kv.layout import KvLayout
from engine.kv.pins import Pins, Retention
from engine.kv.restore_policy import LookupPolicy, RestorePolicy
from engine.kv.store.shared_store import SharedStore
from engine.kv.tiers.tiers import Tiers

WRITE_BEHIND_S = 0.05
"""Seconds between two looks at the blocks that will be evicted next."""
BEHIND_PART = 4
"""Part of the pool, one quarter, whose blocks are written to the shared store before they are evicted."""
MAX_BEHIND = 2048
"""Largest number of such blocks, since each look takes a tenth of a microsecond for each."""


class BlockMemory(Protocol):
    """Access to the bytes of the pool's blocks.

    Its methods may be called on any thread.
    """

    def fingerprints(self, blocks: Seq[int]) -> NDArray[np.uint64]:
        """Return the fingerprints of the blocks' present bytes, [len(blocks), kv_heads]."""

    def read_blocks(self, blocks: Seq[int]) -> Iterable[NDArray[np.uint8]]:
        """Return the bytes of whole blocks, [block_bytes] each; each valid until the next is asked for.

        With several ranks only on the loop's thread.
        """

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        """Set the bytes of a block; with several ranks, this process's part of them."""


class KVCacheManager:
    """Blocks of sequences.

    Every named block has a fingerprint, taken where and when the block became full.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KvLayout,
        memory: BlockMemory,
        tiers: Tiers | None = None,
        rates: RestorePolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        pool: BlockPool | None = None,
        store: SharedStore | None = None,
    ) -> None:
        """Create the manager.

        Evicted blocks go to `tiers` and to the `store` that workers share, and come back where that is faster than
        computing; `rates` are those of tiers. `pool` replaces a pool of `num_blocks` blocks.

        `clock` returns seconds, also for users of this manager.
        """
        self.clock = clock
        self.pool = pool or BlockPool(num_blocks, self._demote if tiers is not None or store is not None else None)
        self.pins = Pins(self.pool, clock)
        self.layout = layout
        self.tiers = tiers
        self.store = store
        self.rates = rates or RestorePolicy()
        self.store_rates = RestorePolicy()
        self.lookups = LookupPolicy()
        """Lookups in the store."""
        self.counts = KvStats()
        self._memory = memory
        self.compute_fingerprints = memory.fingerprints
        self.write_block = memory.write_block
        self._fingerprints = np.zeros((self.pool.num_ids, layout.kv_heads), np.uint64)
        self._in_step: set[Sequence] = set()
        self._write_behind_at = 0.0
        self.lingering: list[Sequence] = []
        """Sequences that finished while a step was writing into their blocks; they keep these until the step ends."""

    @property
    def resumes_at_boundaries(self) -> bool:
        """Whether a request can go on only after some of the cached blocks of its chain."""
        return False

    def usable_keys(self, sequence: Sequence) -> list[BlockKey]:
        """Return the keys of the sequence's full blocks that may come from elsewhere.

        Blocks whose logits are needed here are excluded, so the block of the last token always is.
        """
        width = self.layout.block_tokens
        end = sequence.num_reusable // width * width
        return block_keys(sequence.root, sequence.token_ids[:end], width, sequence.items)

    def start(self, sequence: Sequence, keys: Seq[BlockKey], num_total_blocks: int) -> bool:
        """Give `sequence` the cached blocks of `keys` and reserve the rest; return False when they do not fit now."""
        hits = self.pool.match(keys)
        num_new = num_total_blocks - len(hits)
        if not self.pool.reserve_with(hits, num_new):
            if not self.pins.give_way(num_total_blocks):
                return False
            hits = self.pool.match(keys)
            num_new = num_total_blocks - len(hits)
            if not self.pool.reserve_with(hits, num_new):
                return False
        sequence.blocks = list(hits)
        sequence.keys = list(keys[: len(hits)])
        sequence.num_reserved = num_new
        sequence.num_computed = len(hits) * self.layout.block_tokens
        return True

    def course(self, sequence: Sequence, keys: Seq[BlockKey]) -> Course:
        """Return the course of a sequence from its cached blocks to the last of `keys`."""
        return chain_course(keys, len(sequence.keys), len(keys))

    def course_between(self, keys: Seq[BlockKey], first: int, end: int) -> Course:
        """Return the course of a chain from the boundary `first` to the last one within `keys[:end]`."""
        return chain_course(keys, first, end)

    def cut(self, sequence: Sequence, course: Course, end: int) -> Course:
        """Return a sequence's course to an earlier boundary, at which its loan ends."""
        return course.cut(end)

    def stored_course(self, sequence: Sequence, course: Course) -> Course:
        """Return a sequence's course to the last boundary that the shared store seems to have."""
        return course

    def num_cached(self, keys: Seq[BlockKey]) -> int:
        """Return the last boundary within `keys` at which a request can go on from cached blocks."""
        return len(self.pool.match(keys))

    def adopt(self, sequence: Sequence) -> int:
        """Replace reserved blocks of a starting sequence by blocks that were cached meanwhile; return their number.

        No step may be computing the sequence.
        """
        width, first = self.layout.block_tokens, len(sequence.keys)
        if sequence.num_computed != first * width or len(sequence.blocks) != first:
            return 0
        blocks: list[int] = []
        keys: list[BlockKey] = []
        last = self._last_key(sequence)
        for start in range(first * width, sequence.num_reusable // width * width, width):
            (last,) = block_keys(last, sequence.token_ids[start : start + width], width, sequence.items, start)
            hit = self.pool.match([last])
            if not hit:
                break
            blocks += hit
            keys.append(last)
        if blocks:
            self.pool.unreserve(len(blocks))
            sequence.num_reserved -= len(blocks)
            kept = self.pool.reserve_with(blocks, 0)
            assert kept, "what was promised is there"
            sequence.blocks += blocks
            sequence.keys += keys
            sequence.num_computed += len(blocks) * width
        return len(blocks)

    def fork(
        self, parent: Sequence, child: Sequence, num_tokens: int, num_total_blocks: int
    ) -> list[tuple[int, int]] | None:
        """Let `child`, which has nothing, share the first `num_tokens` computed by `parent`, and reserve all else.

        Full blocks are shared. The child will write into a partial last block, so it gets one of its own: returns pairs
        (block, its copy), to be copied before either is released. Returns None when the child does not fit now. No step
        may be computing the parent.
        """
        assert parent not in self._in_step
        assert num_tokens <= parent.num_computed
        full = num_tokens // self.layout.block_tokens
        if not self.pool.reserve_with(parent.blocks[:full], num_total_blocks - full):
            return None
        child.blocks = parent.blocks[:full]
        child.keys = parent.keys[:full]
        child.num_reserved = num_total_blocks - full
        child.num_computed = num_tokens
        self.grow(child, num_tokens)
        return list(zip(parent.blocks[full:], child.blocks[full:], strict=False))

    def lower_promise(self, sequence: Sequence, num_total_blocks: int) -> None:
        """Give back the part of the sequence's reservation beyond `num_total_blocks` in all."""
        surplus = min(sequence.num_reserved, len(sequence.blocks) + sequence.num_reserved - num_total_blocks)
        if surplus > 0:
            self.pool.unreserve(surplus)
            sequence.num_reserved -= surplus

    def could_start_without(
        self, others: Seq[Sequence], sequence: Sequence, keys: Seq[BlockKey], num_total_blocks: int
    ) -> bool:
        """Return whether `start` would succeed if `others` were preempted."""
        hits = self.pool.match(keys)
        promised = sum(other.num_reserved for other in others)
        held = [other.blocks for other in others]
        return self.pool.could_reserve_without(held, promised, hits, num_total_blocks - len(hits))

    def num_lacking(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the number of blocks to reserve before the sequence can `grow` to `num_tokens`."""
        return max(0, self.layout.blocks_for(num_tokens) - len(sequence.blocks) - sequence.num_reserved)

    def extend(self, sequence: Sequence, count: int) -> None:
        """Reserve `count` more blocks for the sequence; they must be available."""
        kept = self.pool.reserve_with((), count)
        assert kept, f"{count} blocks are not available"
        sequence.num_reserved += count

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate blocks from the sequence's reservation until `num_tokens` fit."""
        self.grow_to(sequence, self.layout.blocks_for(num_tokens))

    def grow_to(self, sequence: Sequence, num_blocks: int) -> None:
        """Allocate blocks from the sequence's reservation until it has `num_blocks`."""
        missing = num_blocks - len(sequence.blocks)
        if missing > 0:
            assert missing <= sequence.num_reserved, "a block is taken that was not promised"
            sequence.blocks += self.pool.allocate(missing)
            sequence.num_reserved -= missing

    def advance(self, sequence: Sequence, count: int) -> list[int]:
        """Count `count` more computed tokens; name and fingerprint the blocks that became full, and return them."""
        sequence.num_computed += count
        first, end = len(sequence.keys), sequence.num_computed // self.layout.block_tokens
        if end == first:
            return []
        blocks = sequence.blocks[first:end]
        self._fingerprints[blocks] = self.compute_fingerprints(blocks)
        self._name(sequence, end)
        if self.store is not None and self.store.writes_at_once:
            keys = sequence.keys[first:]
            parents = [sequence.keys[first - 1] if first else sequence.root, *keys[:-1]]
            self._store_blocks([NamedPlace(*each) for each in zip(blocks, parents, keys, strict=True)])
        return blocks

    def num_restorable(self, keys: Seq[BlockKey]) -> int:
        """Return how many leading blocks the tiers hold, if restoring them is faster than computing them."""
        if self.tiers is None or not keys:
            return 0
        count = self.tiers.match(keys)
        tokens = count * self.layout.block_tokens
        return count if self.rates.worth_restoring(tokens, count * self.layout.block_bytes) else 0

    def worth_fetching(self, num_blocks: int) -> bool:
        """Return whether fetching so many blocks from the shared store is faster than computing them."""
        self.store_rates.prefill_tokens_per_s = self.rates.prefill_tokens_per_s
        tokens = num_blocks * self.layout.block_tokens
        return self.store_rates.worth_restoring(tokens, num_blocks * self.layout.block_bytes)

    def pin_prompt(self, sequence: Sequence, retention: Retention) -> int:
        """Pin the full blocks of the sequence's prompt, which is computed; return their number."""
        count = min(len(sequence.keys), sequence.num_prompt // self.layout.block_tokens)
        return self.pins.pin(sequence.keys[:count], retention)

    def store_keys(self, keys: Seq[BlockKey]) -> int:
        """Give the blocks of these names to the shared store; return how many it has then, or is being given."""
        if self.store is None:
            return 0
        self._store_blocks([place for key in keys if (place := self.pool.named(key)) is not None])
        return sum(not self.store.lacks(key) for key in keys)

    @property
    def num_available(self) -> int:
        """Number of blocks for a new request: pins of an engine that serves nothing else give way."""
        pool = self.pool
        idle = not pool.num_reserved and pool.num_held == len(self.pins)
        return pool.num_available + (pool.num_held if idle else 0)

    def take_cache_events(self) -> list[CacheEvent]:
        """Return changes since the last call of the blocks held here, in the pool or in the tiers."""
        events = self.pool.take_events() + (self.store.take_events() if self.store is not None else [])
        if self.tiers is None:
            return events
        events += self.tiers.take_events()
        return [kept for event in events if (kept := self._without_held(event)) is not None]

    def cache_snapshot(self) -> list[CacheEvent]:
        """Return all blocks held here as events."""
        return self.pool.snapshot() + (self.tiers.snapshot() if self.tiers else [])

    def _without_held(self, event: CacheEvent) -> CacheEvent | None:
        """Reduce an event to blocks not held elsewhere: one that left the pool may be in a tier, and vice versa."""
        if isinstance(event, Stored) or event.shared:
            return event
        assert self.tiers is not None
        gone = tuple(key for key in event.keys if key not in self.pool and not self.tiers.match([key]))
        return Removed(gone) if gone else None

    def _demote(self, evicted: list[NamedPlace]) -> None:
        if self.tiers is not None:
            contents = self._memory.read_blocks([each.block for each in evicted])
            for each, content in zip(evicted, contents, strict=True):
                self.tiers.put(each.parent, each.key, content, self.fingerprints_of([each.block]))
        if self.store is not None:
            self._store_blocks(self._with_ancestors(evicted))

    def write_behind(self) -> None:
        """Put the blocks that will be evicted next, since an eviction must not wait for the shared store."""
        if self.store is None or (now := self.clock()) < self._write_behind_at or not self.store.num_writable:
            return
        self._write_behind_at = now + WRITE_BEHIND_S
        count = min(MAX_BEHIND, self.pool.num_blocks // BEHIND_PART)
        room = self.store.num_writable
        self._store_blocks(self._with_ancestors(self.pool.oldest(count), room)[:room])

    def _with_ancestors(self, places: Iterable[NamedPlace], enough: float = math.inf) -> list[NamedPlace]:
        """Return blocks that the store lacks, each behind those before it in its chain that the pool still has.

        A chain is evicted from its tail, and a tail in the store is of no use without its head. The search ends when
        `enough` are found.
        """
        assert self.store is not None
        chosen: dict[NamedPlace, None] = {}
        for each in places:
            chain: list[NamedPlace] = []
            place: NamedPlace | None = each
            while place is not None and place not in chosen and self.store.lacks(place.key):
                chain.append(place)
                place = self.pool.named(place.parent)
            chosen.update(dict.fromkeys(reversed(chain)))
            if len(chosen) >= enough:
                break
        return list(chosen)

    def _store_blocks(self, blocks: Seq[NamedPlace]) -> None:
        """Put named blocks that the shared store lacks, as far as this engine knows."""
        assert self.store is not None
        lacking = [each for each in blocks if self.store.lacks(each.key)]
        if (surplus := len(lacking) - self.store.num_writable) > 0:
            self.store.drop(surplus)
            lacking = lacking[:-surplus]
        if not lacking:  # a read of no blocks would still wait for a GPU
            return
        contents = self._memory.read_blocks([each.block for each in lacking])
        for each, content in zip(lacking, contents, strict=True):
            self.store.put(each.parent, each.key, content, self.fingerprints_of([each.block]))

    def bind(self, sequence: Sequence, keys: Seq[BlockKey], fingerprints: Seq[bytes]) -> None:
        """Add the sequence's next blocks, which arrived from elsewhere and were verified."""
        first = len(sequence.keys)
        blocks = sequence.blocks[first : first + len(keys)]
        self._fingerprints[blocks] = np.frombuffer(b"".join(fingerprints), np.uint64).reshape(len(blocks), -1)
        self._publish(sequence, keys)
        sequence.num_computed = len(sequence.keys) * self.layout.block_tokens

    @property
    def in_step(self) -> bool:
        """Whether a step is writing into blocks."""
        return bool(self._in_step)

    def begin_step(self, sequences: Iterable[Sequence]) -> None:
        """Mark the blocks of these sequences as being written until `end_step`."""
        assert not self._in_step
        self._in_step = set(sequences)

    def end_step(self) -> None:
        """End the step; release sequences that finished meanwhile."""
        self._in_step = set()
        lingering, self.lingering = self.lingering, []
        for sequence in lingering:
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Release all blocks of the sequence; those that a step is writing into, when it ends."""
        if sequence in self._in_step:
            self.lingering.append(sequence)
            return
        self.pool.release(sequence.blocks)
        self.pool.unreserve(sequence.num_reserved)
        sequence.blocks, sequence.num_reserved = [], 0

    def preempt(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence that will restart; named ones stay cached.

        No step may be computing it.
        """
        assert sequence not in self._in_step
        self.finish(sequence)
        sequence.keys, sequence.num_computed = [], 0

    def quarantine_unbound(self, sequence: Sequence, indices: Seq[int], replace: bool) -> bool:
        """Quarantine the sequence's blocks at chain `indices`; with `replace`, give it others in their place.

        Returns False when there are no others: the chain has holes then, and the sequence can only be finished.
        """
        lost = [sequence.blocks[index] for index in indices]
        kept = replace and self.pool.reserve_with((), len(lost))
        if kept:
            for index, block in zip(indices, self.pool.allocate(len(lost)), strict=True):
                sequence.blocks[index] = block
        else:
            sequence.blocks = [block for block in sequence.blocks if block not in lost]
        self.pool.quarantine(lost)
        return kept

    def fingerprints_of(self, blocks: Seq[int]) -> bytes:
        """Return the fingerprints taken when the blocks became full, uint64 [len(blocks), kv_heads]."""
        return self._fingerprints[list(blocks)].tobytes()

    def _name(self, sequence: Sequence, end: int) -> None:
        first = len(sequence.keys)
        width = self.layout.block_tokens
        tokens = sequence.token_ids[first * width : end * width]
        keys = block_keys(self._last_key(sequence), tokens, width, sequence.items, first * width)
        self._publish(sequence, keys)

    def _publish(self, sequence: Sequence, keys: Seq[BlockKey]) -> None:
        first = len(sequence.keys)
        self.pool.publish(self._last_key(sequence), keys, sequence.blocks[first : first + len(keys)])
        sequence.keys += keys

    def _last_key(self, sequence: Sequence) -> BlockKey:
        return sequence.keys[-1] if sequence.keys else sequence.root
