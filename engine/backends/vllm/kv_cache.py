"""KV cache manager over vLLM's block pool.

A sequence is first Tandem's: it holds cached blocks and a reservation, and takes blocks for borrowed KV. When nothing
is left to borrow it is *submitted*: vLLM schedules it, finds the same blocks in its prefix cache, and holds them.

    admitted ──borrows──▶ hardened ──loan is over──▶ submitted ──▶ finished
        └──────────nothing to borrow──────────────────┘

A reservation is a count, and vLLM takes blocks beyond a request's reservation when its output is long. So a sequence
that waits for a lender hardens its reservation: it takes the blocks, and vLLM cannot use them meanwhile.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.vllm.block_pool import VllmBlockPool
from engine.backends.vllm.kv_memory import VllmKvMemory
from engine.block_keys import BlockKey
from engine.core_types import Sequence
from engine.kv.block_pool import NamedPlace
from engine.kv.kv_cache_manager import KVCacheManager
from engine.kv.store.shared_store import SharedStore


class VllmKVCache(KVCacheManager):
    """Blocks of sequences before they are submitted, and reservations of all sequences."""

    pool: VllmBlockPool

    def __init__(
        self,
        memory: VllmKvMemory,
        block_pool: Any,
        clock: Callable[[], float],
        on_finish: Callable[[Sequence], None],
        store: SharedStore | None = None,
    ) -> None:
        """Create the manager over vLLM's BlockPool.

        `on_finish` is called with each sequence that gives its blocks back.
        """
        pool = VllmBlockPool(block_pool, None if store is None else self._demote)
        super().__init__(pool.num_blocks, memory.layout, memory, clock=clock, pool=pool, store=store)
        self._on_finish = on_finish
        self._hardened: dict[Sequence, list[int]] = {}
        """Blocks taken for a reservation and not used yet."""
        self.num_steps = 0
        """Number of steps in flight."""

    @property
    def in_step(self) -> bool:
        """Whether a step is writing into blocks."""
        return self.num_steps > 0

    @property
    def hardened(self) -> list[list[int]]:
        """Block lists of hardened reservations."""
        return list(self._hardened.values())

    def harden(self, sequence: Sequence) -> None:
        """Take the blocks of a reservation that was made just now."""
        count, sequence.num_reserved = sequence.num_reserved, 0
        self._hardened[sequence] = self.pool.allocate(count)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        missing = self.layout.blocks_for(num_tokens) - len(sequence.blocks)
        if missing > 0:
            taken = self._hardened[sequence]
            assert missing <= len(taken), "a block is taken that was not promised"
            sequence.blocks += taken[:missing]
            del taken[:missing]

    def soften(self, sequence: Sequence) -> None:
        """Return the blocks of a hardened reservation to the pool, as a reservation again."""
        if taken := self._hardened.pop(sequence, None):
            self.pool.release(taken)
            reserved = self.pool.reserve_with((), len(taken))
            assert reserved, "blocks given back just now are free"
            sequence.num_reserved += len(taken)

    def hand_over(self, sequence: Sequence) -> None:
        """Drop the sequence's references: vLLM holds the same blocks by now."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def promise(self, sequence: Sequence, num_blocks: int) -> None:
        """Lower the sequence's reservation to `num_blocks`."""
        if sequence.num_reserved > num_blocks:
            self.pool.unreserve(sequence.num_reserved - num_blocks)
            sequence.num_reserved = num_blocks

    def finish(self, sequence: Sequence) -> None:
        if taken := self._hardened.pop(sequence, None):
            self.pool.release(taken)
        super().finish(sequence)
        self._on_finish(sequence)

    def unnamed(self, parent: BlockKey, keys: Seq[BlockKey], blocks: Seq[int]) -> list[NamedPlace]:
        """Return the blocks among these that have no such name yet; `keys` are a chain that follows `parent`."""
        places = [NamedPlace(*each) for each in zip(blocks, [parent, *keys[:-1]], keys, strict=True)]
        return [each for each in places if not self.pool.has_name(each.parent, each.key, each.block)]

    def name(self, places: Seq[NamedPlace], fingerprints: NDArray[np.uint64]) -> None:
        """Name held blocks that a step filled; the fingerprints are [places, KV heads]."""
        new = []
        for each, fingerprint in zip(places, fingerprints, strict=True):
            if self.pool.filled(each.parent, each.key, each.block):
                self._fingerprints[each.block] = fingerprint
                new.append(each)
        if new and self.store is not None and self.store.writes_at_once:
            self._store_blocks(new)

    def _publish(self, sequence: Sequence, keys: Seq[BlockKey]) -> None:
        first = len(sequence.keys)
        self.pool.publish_at(first, self._last_key(sequence), keys, sequence.blocks[first : first + len(keys)])
        sequence.keys += keys
