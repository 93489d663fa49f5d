"""KV cache manager over vLLM's block pool.

A sequence is first Tandem's: it holds cached blocks and a reservation, and takes blocks for borrowed KV. When nothing
is left to borrow it is *submitted*: vLLM schedules it, finds the same blocks in its prefix cache, and holds them.

    admitted ──borrows──▶ allocated ──loan is over──▶ submitted ──▶ finished
        └──────────nothing to borrow──────────────────┘

A reservation is a count, and vLLM takes blocks beyond a request's reservation when its output is long. So a sequence
that waits for a loan allocates what it reserved, and vLLM cannot use these blocks meanwhile.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.vllm.kv.block_pool import GroupPlace, VllmBlockPool
from engine.backends.vllm.kv.boundaries import StoredBoundaries
from engine.backends.vllm.kv.groups import GroupRange, KvGroups
from engine.backends.vllm.kv.memory import KvMemory
from kvcache.block_keys import BlockKey
from kvcache.cached_blocks import CachedBlocks, StoreBelow
from kvcache.chain import BlockRange, Chain, GroupBlock, chain_range
from kvcache.kv_view import leading_keys, quarantine_unbound, start_chain, usable_keys
from kvcache.pool import NamedBlock
from kvcache.store.kv_store import KvStore


class VllmKVCache:
    """Blocks of sequences before they are submitted, and reservations of all sequences; implements `KvView`."""

    lingering = ()

    def __init__(
        self,
        memory: KvMemory,
        block_pool: Any,
        groups: KvGroups,
        clock: Callable[[], float],
        on_finish: Callable[[Chain], None],
        stores: Sequence[KvStore] = (),
    ) -> None:
        """Create the manager over vLLM's BlockPool and its groups.

        `on_finish` is called with each sequence that gives its blocks back.
        """
        self.pool = VllmBlockPool(block_pool, groups)
        self.groups = groups
        self.layout = memory.layout
        below = [StoreBelow(store, self._translator(store)) for store in stores]
        self.cached = CachedBlocks(self.pool, memory.layout, memory, clock, below)
        self._ranges: dict[Chain, GroupRange] = {}
        """Block ranges of sequences that are not submitted, with several groups."""
        self._on_finish = on_finish
        self._allocated: dict[Chain, list[int]] = {}
        """Blocks taken for a reservation and not used yet."""
        self.num_steps = 0
        """Number of steps in flight."""

    def _translator(self, store: KvStore) -> StoredBoundaries | None:
        if self.groups.is_chain:
            return None
        return StoredBoundaries(self.groups.tails(), self.groups.widths, is_shared=not store.is_local)

    @property
    def resumes_at_boundaries(self) -> bool:
        return not self.groups.is_chain

    @property
    def in_step(self) -> bool:
        return self.num_steps > 0

    @property
    def allocated(self) -> list[list[int]]:
        """Block lists of reservations that were allocated early."""
        return list(self._allocated.values())

    def wait_for_loan(self, sequence: Chain) -> None:
        """Take the blocks of the sequence's reservation, once."""
        if sequence in self._allocated:
            return
        count, sequence.num_reserved = sequence.num_reserved, 0
        self._allocated[sequence] = self.pool.allocate(count)

    def start(self, sequence: Chain, keys: Sequence[BlockKey], num_total_blocks: int) -> bool:
        if self.groups.is_chain:
            return start_chain(self.cached, sequence, keys, num_total_blocks)
        if self._start(sequence, keys, num_total_blocks):
            return True
        return self.cached.pins.give_way(num_total_blocks) and self._start(sequence, keys, num_total_blocks)

    def _start(self, sequence: Chain, keys: Sequence[BlockKey], num_total_blocks: int) -> bool:
        first, held = self.pool.resumable(keys)
        block_range = self.groups.range_of(keys, first, len(keys))
        # a loan brings the tails of another boundary while those of the first one are held
        num_new = max(num_total_blocks - len(held), len(block_range.names) - block_range.start)
        if not self.pool.reserve_with([block for _, block in held], num_new):
            return False
        sequence.blocks = [block for _, block in held]
        sequence.keys = [each.name for each, _ in held]
        sequence.num_reserved = num_new
        sequence.num_computed = first * self.groups.unit
        self._ranges[sequence] = block_range
        return True

    def stored_range(self, sequence: Chain, block_range: BlockRange, below: StoreBelow) -> BlockRange:
        stored = below.translator
        if not isinstance(stored, StoredBoundaries) or not isinstance(block_range, GroupRange):
            return block_range
        ends = range(block_range.end, block_range.first, -1)
        known = next((end for end in ends if block_range.keys[end - 1] in stored), block_range.end)
        return block_range if known == block_range.end else self.cut(sequence, block_range, known)

    def range_of(self, sequence: Chain, keys: Sequence[BlockKey]) -> BlockRange:
        if self.groups.is_chain:
            return chain_range(keys, len(sequence.keys), len(keys))
        return self._ranges[sequence]

    def range_between(self, keys: Sequence[BlockKey], first: int, end: int) -> BlockRange:
        if self.groups.is_chain:
            return chain_range(keys, first, end)
        return self.groups.range_of(keys, first, end)

    def cut(self, sequence: Chain, block_range: BlockRange, end: int) -> BlockRange:
        shorter = block_range.cut(end)
        if isinstance(shorter, GroupRange):
            self._ranges[sequence] = shorter
        return shorter

    def num_cached(self, keys: Sequence[BlockKey]) -> int:
        return len(self.pool.match(keys)) if self.groups.is_chain else self.pool.resumable(keys)[0]

    def usable_keys(self, sequence: Chain) -> list[BlockKey]:
        return usable_keys(sequence, self.layout.block_tokens)

    def prompt_names(self, sequence: Chain) -> list[BlockKey]:
        width = self.layout.block_tokens
        end = sequence.num_prompt // width * width
        keys = leading_keys(sequence, end // width, width)
        return keys if self.groups.is_chain else [block.name for block in self.groups.needs(keys)[1]]

    def quarantine_unbound(self, sequence: Chain, indices: Sequence[int], replace: bool) -> bool:
        return quarantine_unbound(self.pool, sequence, indices, replace)

    def grow_to(self, sequence: Chain, num_blocks: int) -> None:
        missing = num_blocks - len(sequence.blocks)
        if missing > 0:
            taken = self._allocated[sequence]
            assert missing <= len(taken), "a block is allocated that was not reserved"
            sequence.blocks += taken[:missing]
            del taken[:missing]

    def release_unfound(self, sequence: Chain) -> None:
        """Return the blocks that a sequence holds and vLLM will not find to the pool, as a reservation again.

        vLLM computes the sequence next, and might wait for these very blocks.
        """
        kept = self._found_by_vllm(sequence)
        taken = self._allocated.pop(sequence, []) + [block for block in sequence.blocks if block not in kept]
        if taken:
            self.pool.release_reserved(taken)
            sequence.num_reserved += len(taken)
            sequence.blocks = [block for block in sequence.blocks if block in kept]

    def _found_by_vllm(self, sequence: Chain) -> set[int]:
        """Return the blocks among a sequence's own that its boundary needs."""
        bound = zip(sequence.keys, sequence.blocks, strict=False)
        if (block_range := self._ranges.get(sequence)) is None:
            return {block for _, block in bound}
        _, needed = self.groups.needs(block_range.keys[: sequence.num_computed // self.groups.unit])
        names = {each.name for each in needed}
        return {block for name, block in bound if name in names}

    def release_held(self, sequence: Chain) -> None:
        """Drop the sequence's references: vLLM holds the same blocks by now."""
        self._ranges.pop(sequence, None)
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def lower_reservation(self, sequence: Chain, num_blocks: int) -> None:
        """Lower the sequence's reservation to `num_blocks`."""
        if sequence.num_reserved > num_blocks:
            self.pool.unreserve(sequence.num_reserved - num_blocks)
            sequence.num_reserved = num_blocks

    def finish(self, sequence: Chain) -> None:
        self._ranges.pop(sequence, None)
        if taken := self._allocated.pop(sequence, None):
            self.pool.release(taken)
        self.pool.release(sequence.blocks)
        self.pool.unreserve(sequence.num_reserved)
        sequence.blocks, sequence.num_reserved = [], 0
        self._on_finish(sequence)

    def name(self, places: Sequence[GroupPlace], fingerprints: NDArray[np.uint64]) -> None:
        """Name held blocks that a step filled; the fingerprints are [places, KV heads]."""
        new = []
        for each, fingerprint in zip(places, fingerprints, strict=True):
            if self.pool.filled(each):
                self.cached.set_fingerprints([each.block], fingerprint)
                new.append(NamedBlock(each.block, each.parent, each.key))
        self.cached.became_full(new)

    def bind(self, sequence: Chain, keys: Sequence[BlockKey], fingerprints: Sequence[bytes]) -> None:
        first_computed, first = sequence.num_computed, len(sequence.keys)
        blocks = sequence.blocks[first : first + len(keys)]
        self.cached.set_fingerprints(blocks, np.frombuffer(b"".join(fingerprints), np.uint64).reshape(len(blocks), -1))
        self._publish(sequence, keys)
        sequence.num_computed = len(sequence.keys) * self.layout.block_tokens
        if (block_range := self._ranges.get(sequence)) is not None:
            is_whole = len(sequence.keys) == len(block_range.names)
            sequence.num_computed = block_range.end * self.groups.unit if is_whole else first_computed

    def _publish(self, sequence: Chain, keys: Sequence[BlockKey]) -> None:
        first = len(sequence.keys)
        blocks = sequence.blocks[first : first + len(keys)]
        if (block_range := self._ranges.get(sequence)) is not None:
            new = block_range.blocks[first : first + len(keys)]
        else:
            parents = [sequence.keys[-1] if sequence.keys else sequence.root, *keys[:-1]]
            new = [
                GroupBlock(end, 0, key, key, parent)
                for end, (key, parent) in enumerate(zip(keys, parents, strict=True), first + 1)
            ]
        self.pool.publish_at([self.place(sequence.root, each, block) for each, block in zip(new, blocks, strict=True)])
        sequence.keys += keys

    def place(self, root: BlockKey, block: GroupBlock, number: int) -> GroupPlace:
        """Return the place of a block in the chain of this root."""
        in_chain = block.group == self.groups.chain_group
        parent = (block.before or root) if in_chain else block.key
        return GroupPlace(number, parent, block.name, block)
