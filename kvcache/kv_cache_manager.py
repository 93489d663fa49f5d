"""The embedded engine's KV cache manager: reserves, names and releases the blocks of sequences."""

from collections.abc import Iterable, Sequence

import numpy as np

from kvcache.block_keys import BlockKey, block_keys
from kvcache.block_pool import BlockPool
from kvcache.cached_blocks import CachedBlocks, StoreBelow
from kvcache.chain import BlockRange, Chain, chain_range
from kvcache.kv_view import quarantine_unbound, start_chain, usable_keys
from kvcache.pool import NamedBlock


class KVCacheManager:
    """Blocks of sequences over a `BlockPool`; implements `KvView`."""

    resumes_at_boundaries = False

    def __init__(self, cached: CachedBlocks, pool: BlockPool) -> None:
        """Create the manager of the pool whose blocks `cached` keeps."""
        self.cached = cached
        self.pool = pool
        self.layout = cached.layout
        self._in_step: set[Chain] = set()
        self.lingering: list[Chain] = []
        """Sequences that finished while a step was writing into their blocks; they keep these until the step ends."""

    def usable_keys(self, sequence: Chain) -> list[BlockKey]:
        return usable_keys(sequence, self.layout.block_tokens)

    def start(self, sequence: Chain, keys: Sequence[BlockKey], num_total_blocks: int) -> bool:
        return start_chain(self.cached, sequence, keys, num_total_blocks)

    def range_of(self, sequence: Chain, keys: Sequence[BlockKey]) -> BlockRange:
        return chain_range(keys, len(sequence.keys), len(keys))

    def range_between(self, keys: Sequence[BlockKey], first: int, end: int) -> BlockRange:
        return chain_range(keys, first, end)

    def cut(self, sequence: Chain, block_range: BlockRange, end: int) -> BlockRange:
        return block_range.cut(end)

    def stored_range(self, sequence: Chain, block_range: BlockRange, below: StoreBelow) -> BlockRange:
        return block_range

    def num_cached(self, keys: Sequence[BlockKey]) -> int:
        return len(self.pool.match(keys))

    def wait_for_loan(self, sequence: Chain) -> None:
        """Do nothing: nobody else takes blocks that are reserved."""

    def adopt(self, sequence: Chain) -> int:
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
            assert kept, "what was reserved is there"
            sequence.blocks += blocks
            sequence.keys += keys
            sequence.num_computed += len(blocks) * width
        return len(blocks)

    def fork(self, parent: Chain, child: Chain, num_tokens: int, num_total_blocks: int) -> list[tuple[int, int]] | None:
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

    def lower_reservation(self, sequence: Chain, num_total_blocks: int) -> None:
        """Give back the part of the sequence's reservation beyond `num_total_blocks` in all."""
        surplus = min(sequence.num_reserved, len(sequence.blocks) + sequence.num_reserved - num_total_blocks)
        if surplus > 0:
            self.pool.unreserve(surplus)
            sequence.num_reserved -= surplus

    def could_start_without(
        self,
        others: Sequence[Chain],
        sequence: Chain,
        keys: Sequence[BlockKey],
        num_total_blocks: int,
    ) -> bool:
        """Return whether `start` would succeed if `others` were preempted."""
        hits = self.pool.match(keys)
        reserved = sum(other.num_reserved for other in others)
        held = [other.blocks for other in others]
        return self.pool.could_reserve_without(held, reserved, hits, num_total_blocks - len(hits))

    def num_lacking(self, sequence: Chain, num_tokens: int) -> int:
        """Return the number of blocks to reserve before the sequence can `grow` to `num_tokens`."""
        return max(0, self.layout.blocks_for(num_tokens) - len(sequence.blocks) - sequence.num_reserved)

    def extend(self, sequence: Chain, count: int) -> None:
        """Reserve `count` more blocks for the sequence; they must be available."""
        kept = self.pool.reserve_with((), count)
        assert kept, f"{count} blocks are not available"
        sequence.num_reserved += count

    def grow(self, sequence: Chain, num_tokens: int) -> None:
        """Allocate blocks from the sequence's reservation until `num_tokens` fit."""
        self.grow_to(sequence, self.layout.blocks_for(num_tokens))

    def grow_to(self, sequence: Chain, num_blocks: int) -> None:
        missing = num_blocks - len(sequence.blocks)
        if missing > 0:
            assert missing <= sequence.num_reserved, "a block is allocated that was not reserved"
            sequence.blocks += self.pool.allocate(missing)
            sequence.num_reserved -= missing

    def advance(self, sequence: Chain, count: int) -> list[int]:
        """Count `count` more computed tokens; name and fingerprint the blocks that became full, and return them."""
        sequence.num_computed += count
        first, end = len(sequence.keys), sequence.num_computed // self.layout.block_tokens
        if end == first:
            return []
        blocks = sequence.blocks[first:end]
        self.cached.set_fingerprints(blocks, self.cached.compute_fingerprints(blocks))
        self._name(sequence, end)
        if not self.cached.stores:
            return blocks
        keys = sequence.keys[first:]
        parents = [sequence.keys[first - 1] if first else sequence.root, *keys[:-1]]
        self.cached.became_full([NamedBlock(*each) for each in zip(blocks, parents, keys, strict=True)])
        return blocks

    def prompt_names(self, sequence: Chain) -> list[BlockKey]:
        return sequence.keys[: sequence.num_prompt // self.layout.block_tokens]

    def bind(self, sequence: Chain, keys: Sequence[BlockKey], fingerprints: Sequence[bytes]) -> None:
        first = len(sequence.keys)
        blocks = sequence.blocks[first : first + len(keys)]
        self.cached.set_fingerprints(blocks, np.frombuffer(b"".join(fingerprints), np.uint64).reshape(len(blocks), -1))
        self._publish(sequence, keys)
        sequence.num_computed = len(sequence.keys) * self.layout.block_tokens

    @property
    def in_step(self) -> bool:
        return bool(self._in_step)

    def begin_step(self, sequences: Iterable[Chain]) -> None:
        """Mark the blocks of these sequences as being written until `end_step`."""
        assert not self._in_step
        self._in_step = set(sequences)

    def end_step(self) -> None:
        """End the step; release sequences that finished meanwhile."""
        self._in_step = set()
        lingering, self.lingering = self.lingering, []
        for sequence in lingering:
            self.finish(sequence)

    def finish(self, sequence: Chain) -> None:
        if sequence in self._in_step:
            self.lingering.append(sequence)
            return
        self.pool.release(sequence.blocks)
        self.pool.unreserve(sequence.num_reserved)
        sequence.blocks, sequence.num_reserved = [], 0

    def preempt(self, sequence: Chain) -> None:
        """Take all blocks from a sequence that will restart; named ones stay cached.

        No step may be computing it.
        """
        assert sequence not in self._in_step
        self.finish(sequence)
        sequence.keys, sequence.num_computed = [], 0

    def quarantine_unbound(self, sequence: Chain, indices: Sequence[int], replace: bool) -> bool:
        return quarantine_unbound(self.pool, sequence, indices, replace)

    def _name(self, sequence: Chain, end: int) -> None:
        first = len(sequence.keys)
        width = self.layout.block_tokens
        tokens = sequence.token_ids[first * width : end * width]
        keys = block_keys(self._last_key(sequence), tokens, width, sequence.items, first * width)
        self._publish(sequence, keys)

    def _publish(self, sequence: Chain, keys: Sequence[BlockKey]) -> None:
        first = len(sequence.keys)
        self.pool.publish(self._last_key(sequence), keys, sequence.blocks[first : first + len(keys)])
        sequence.keys += keys

    def _last_key(self, sequence: Chain) -> BlockKey:
        return sequence.keys[-1] if sequence.keys else sequence.root
