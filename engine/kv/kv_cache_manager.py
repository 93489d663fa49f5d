"""The blocks of sequences: reserving, naming as they fill, releasing. Owns the pool and the fingerprints."""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.core.core_types import Sequence
from engine.kv.block_keys import BlockKey, block_keys
from engine.kv.block_pool import BlockPool, CacheEvent, Evicted, Removed, Stored
from engine.kv.kv_stats import KvStats
from engine.kv.layout import KvLayout
from engine.kv.restore_policy import RestorePolicy
from engine.kv.tiers.tiers import Tiers


class BlockMemory(Protocol):
    """The bytes of the pool's blocks. All of it may be called on any thread."""

    def fingerprints(self, blocks: Seq[int]) -> NDArray[np.uint64]:
        """Of the blocks' bytes as they are now: [len(blocks), kv_heads]."""

    def read_blocks(self, blocks: Seq[int]) -> Seq[NDArray[np.uint8]]:
        """Their bytes, [block_bytes] each; valid until the blocks are written."""

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        """Set its bytes."""


class KVCacheManager:
    """Every named block has its fingerprint here, taken where and when the block became full."""

    def __init__(
        self,
        num_blocks: int,
        layout: KvLayout,
        memory: BlockMemory,
        tiers: Tiers | None = None,
        rates: RestorePolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """What the pool evicts goes to `tiers`, and comes back where `rates` say that it is worth it. `clock` says the
        time for everybody who keeps these books, in seconds."""
        self.clock = clock
        self.pool = BlockPool(num_blocks, self._demote if tiers is not None else None)
        self.layout = layout
        self.tiers = tiers
        self.rates = rates or RestorePolicy()
        self.counts = KvStats()
        self._memory = memory
        self.compute_fingerprints = memory.fingerprints
        self.write_block = memory.write_block
        self._fingerprints = np.zeros((self.pool.num_blocks, layout.kv_heads), np.uint64)
        self._in_step: set[Sequence] = set()
        self.lingering: list[Sequence] = []
        """Finished while they were being computed: the step still writes into their blocks, so they keep them."""

    def usable_keys(self, sequence: Sequence) -> list[BlockKey]:
        """Of the sequence's full blocks that may come from elsewhere.

        None whose logits are needed here is among them, so never the block of the last token.
        """
        width = self.layout.block_tokens
        end = sequence.num_reusable // width * width
        return block_keys(sequence.root, sequence.token_ids[:end], width)

    def start(self, sequence: Sequence, keys: Seq[BlockKey], num_total_blocks: int) -> bool:
        """Give `sequence` the cached blocks of `keys` and a promise of the rest; False when they do not fit now."""
        hits = self.pool.match(keys)
        num_new = num_total_blocks - len(hits)
        if not self.pool.reserve_with(hits, num_new):
            return False
        sequence.blocks = list(hits)
        sequence.keys = list(keys[: len(hits)])
        sequence.num_reserved = num_new
        sequence.num_computed = len(hits) * self.layout.block_tokens
        return True

    def adopt(self, sequence: Sequence) -> int:
        """Give a sequence that is about to be computed what others have computed of it since it started: in place of
        blocks it was promised. Returns how many. No step is computing it."""
        width, first = self.layout.block_tokens, len(sequence.keys)
        if sequence.num_computed != first * width or len(sequence.blocks) != first:
            return 0
        found: list[int] = []
        keys: list[BlockKey] = []
        last = self._last_key(sequence)
        for start in range(first * width, sequence.num_reusable // width * width, width):
            (last,) = block_keys(last, sequence.token_ids[start : start + width], width)
            hit = self.pool.match([last])
            if not hit:
                break
            found += hit
            keys.append(last)
        if found:
            self.pool.unreserve(len(found))
            sequence.num_reserved -= len(found)
            kept = self.pool.reserve_with(found, 0)
            assert kept, "what was promised is there"
            sequence.blocks += found
            sequence.keys += keys
            sequence.num_computed += len(found) * width
        return len(found)

    def fork(
        self, parent: Sequence, child: Sequence, num_tokens: int, num_total_blocks: int
    ) -> list[tuple[int, int]] | None:
        """Let `child`, which has nothing, share the first `num_tokens` of what `parent` has computed, with a promise of
        all else; None when that does not fit now.

        Full blocks are shared. Into the last one, if it is partial, the child will write, so it gets one of its own:
        returns (block, its copy), to be copied before either is released. No step may be computing the parent.
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
        """Give back what of the sequence's promise goes beyond so many blocks in all."""
        surplus = min(sequence.num_reserved, len(sequence.blocks) + sequence.num_reserved - num_total_blocks)
        if surplus > 0:
            self.pool.unreserve(surplus)
            sequence.num_reserved -= surplus

    def could_start_without(
        self, others: Seq[Sequence], sequence: Sequence, keys: Seq[BlockKey], num_total_blocks: int
    ) -> bool:
        """`start` would succeed, were `others` preempted."""
        hits = self.pool.match(keys)
        promised = sum(other.num_reserved for other in others)
        held = [other.blocks for other in others]
        return self.pool.could_reserve_without(held, promised, hits, num_total_blocks - len(hits))

    def num_lacking(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks the sequence must be promised before it can `grow` to `num_tokens`."""
        return max(0, self.layout.blocks_for(num_tokens) - len(sequence.blocks) - sequence.num_reserved)

    def extend(self, sequence: Sequence, count: int) -> None:
        """Promise the sequence `count` more blocks; they are available."""
        kept = self.pool.reserve_with((), count)
        assert kept, f"{count} blocks are not available"
        sequence.num_reserved += count

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Take blocks from the sequence's promise until it has room for `num_tokens`."""
        missing = self.layout.blocks_for(num_tokens) - len(sequence.blocks)
        if missing > 0:
            assert missing <= sequence.num_reserved, "a block is taken that was not promised"
            sequence.blocks += self.pool.allocate(missing)
            sequence.num_reserved -= missing

    def advance(self, sequence: Sequence, count: int) -> list[int]:
        """`count` more tokens of the sequence were computed here: name and fingerprint the blocks that are full now.

        Returns those blocks.
        """
        sequence.num_computed += count
        first, end = len(sequence.keys), sequence.num_computed // self.layout.block_tokens
        if end == first:
            return []
        blocks = sequence.blocks[first:end]
        self._fingerprints[blocks] = self.compute_fingerprints(blocks)
        self._name(sequence, end)
        return blocks

    def num_restorable(self, keys: Seq[BlockKey]) -> int:
        """How many leading blocks the tiers hold, if bringing them back is quicker than computing them."""
        if self.tiers is None or not keys:
            return 0
        count = self.tiers.match(keys)
        tokens = count * self.layout.block_tokens
        return count if self.rates.worth_restoring(tokens, count * self.layout.block_bytes) else 0

    def take_cache_events(self) -> list[CacheEvent]:
        """Changes since the last call of what is held here, in the pool or in the tiers below it."""
        events = self.pool.take_events()
        if self.tiers is None:
            return events
        events += self.tiers.take_events()
        return [kept for event in events if (kept := self._without_held(event)) is not None]

    def cache_snapshot(self) -> list[CacheEvent]:
        """All that is held here, as events."""
        return self.pool.snapshot() + (self.tiers.snapshot() if self.tiers else [])

    def _without_held(self, event: CacheEvent) -> CacheEvent | None:
        """What left the pool may be in a tier by now, and the other way round."""
        if isinstance(event, Stored):
            return event
        assert self.tiers is not None
        gone = tuple(key for key in event.keys if key not in self.pool and not self.tiers.match([key]))
        return Removed(gone) if gone else None

    def _demote(self, evicted: list[Evicted]) -> None:
        assert self.tiers is not None
        contents = self._memory.read_blocks([each.block for each in evicted])
        for each, content in zip(evicted, contents, strict=True):
            self.tiers.put(each.parent, each.key, content, self.fingerprints_of([each.block]))

    def bind(self, sequence: Sequence, keys: Seq[BlockKey], fingerprints: Seq[bytes]) -> None:
        """The sequence's next blocks, of these keys, arrived from elsewhere and were verified."""
        first = len(sequence.keys)
        blocks = sequence.blocks[first : first + len(keys)]
        self._fingerprints[blocks] = np.frombuffer(b"".join(fingerprints), np.uint64).reshape(len(blocks), -1)
        self._publish(sequence, keys)
        sequence.num_computed = len(sequence.keys) * self.layout.block_tokens

    @property
    def in_step(self) -> bool:
        """Some sequences' blocks are being written."""
        return bool(self._in_step)

    def begin_step(self, sequences: Iterable[Sequence]) -> None:
        """From now until `end_step` the blocks of these sequences are being written."""
        assert not self._in_step
        self._in_step = set(sequences)

    def end_step(self) -> None:
        """Nothing is being written any more; who finished meanwhile releases now."""
        self._in_step = set()
        lingering, self.lingering = self.lingering, []
        for sequence in lingering:
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Release everything the sequence has; what a step is writing into, when that is over."""
        if sequence in self._in_step:
            self.lingering.append(sequence)
            return
        self.pool.release(sequence.blocks)
        self.pool.unreserve(sequence.num_reserved)
        sequence.blocks, sequence.num_reserved = [], 0

    def preempt(self, sequence: Sequence) -> None:
        """Take everything back from a sequence that goes on; what is named stays as cache. No step computes it now."""
        assert sequence not in self._in_step
        self.finish(sequence)
        sequence.keys, sequence.num_computed = [], 0

    def quarantine_unbound(self, sequence: Sequence, indices: Seq[int], replace: bool) -> bool:
        """Quarantine the sequence's blocks at chain `indices`; with `replace`, give it others in their place.

        False when it has none in their place: its chain has holes then, and it can only be finished.
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
        """Those taken when the blocks became full: uint64 [len(blocks), kv_heads]."""
        return self._fingerprints[list(blocks)].tobytes()

    def _name(self, sequence: Sequence, end: int) -> None:
        first = len(sequence.keys)
        width = self.layout.block_tokens
        tokens = sequence.token_ids[first * width : end * width]
        self._publish(sequence, block_keys(self._last_key(sequence), tokens, width))

    def _publish(self, sequence: Sequence, keys: Seq[BlockKey]) -> None:
        first = len(sequence.keys)
        self.pool.publish(self._last_key(sequence), keys, sequence.blocks[first : first + len(keys)])
        sequence.keys += keys

    def _last_key(self, sequence: Sequence) -> BlockKey:
        return sequence.keys[-1] if sequence.keys else sequence.root
