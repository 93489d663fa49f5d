"""KV of a stock vLLM engine, as loans use it: blocks of vLLM's own pool under Tandem's names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.backends.vllm.kv.block_pool import GroupPlace
from engine.backends.vllm.kv.cache import VllmKVCache
from engine.backends.vllm.kv.groups import KvGroups
from engine.backends.vllm.kv.memory import KvMemory
from kvcache.block_keys import BlockKey
from kvcache.chain import Chain
from tandem_connector.names import Hashes, RequestNames

KEYS_PER_BLOCK = 8
"""Keys that are remembered for each block of the pool; those of evicted blocks and of prompts are among them."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class BorrowedChain(Chain):
    """The prompt of a request that borrows; the logits of its last token are needed here."""

    @property
    def num_reusable(self) -> int:
        return len(self.token_ids) - 1


class ConnectorKv(VllmKVCache):
    """Blocks of chains whose requests are vLLM's own.

    vLLM allocates, finds and frees the blocks of requests. This class holds what a loan brings until vLLM has taken it.
    """

    def __init__(
        self, memory: KvMemory, manager: Any, groups: KvGroups, hashes: Hashes, clock: Callable[[], float]
    ) -> None:
        """Create it over vLLM's KVCacheManager; `groups` name blocks by these `hashes`."""
        super().__init__(memory, manager.block_pool, groups, clock, lambda chain: None)
        self.hashes = hashes
        hashes.bound(self._names_a_block, KEYS_PER_BLOCK * self.pool.num_ids)
        self._manager = manager
        self._hashed: set[int] = set()
        """Blocks whose fingerprint was taken since they were named."""

    def _names_a_block(self, key: BlockKey) -> bool:
        return any(self.groups.name(key, group) in self.pool for group in range(self.groups.num_groups))

    # ------------------------------------------------------------------ loans taken

    def start_borrowing(self, chain: BorrowedChain, keys: Sequence[BlockKey]) -> bool:
        """Give the chain its cached blocks, and allocate those of its loan; return False where they do not fit."""
        return self.start(chain, keys, len(keys) if self.groups.is_chain else 0)

    def quarantine_unbound(self, sequence: Chain, indices: Sequence[int], replace: bool) -> bool:
        """Quarantine blocks and give none in their place: the thread of loans allocates nothing."""
        return super().quarantine_unbound(sequence, indices, replace=False)

    def keep_bound(self, chain: Chain) -> None:
        """Release the blocks of an ended loan that are not bound."""
        self.release_unfound(chain)
        self.lower_reservation(chain, 0)

    # ------------------------------------------------------------------ blocks of vLLM's requests

    def name_filled(self, names: RequestNames, num_tokens: int, first: int) -> tuple[int, list[int]]:
        """Name the blocks that a request has filled with its first `num_tokens` tokens.

        Those of the `first` keys were named before. Returns how many keys are named now, and the blocks that are new.
        """
        groups, request = self.groups, names.request
        end = min(num_tokens // groups.unit, len(request.block_hashes))
        if end <= first:
            return first, []
        keys = names.upto(end)
        self.hashes.learn(keys[first:], request.block_hashes[first:end])
        by_group = self._manager.get_block_ids(request.request_id)
        places = list[GroupPlace]()
        for group, (width, blocks) in enumerate(zip(groups.widths, by_group, strict=True)):
            for at in range(first // width, min(end // width, len(blocks))):
                if number := blocks[at]:
                    place = self.place(names.root, groups.block(keys, group, at, end), number)
                    if self.pool.is_cached(place):
                        places.append(place)
        new = list[int]()
        for place in sorted(places, key=lambda place: place.of):
            if self.pool.filled(place):
                self._hashed.discard(place.block)
            if self.pool.is_filled(place.block, place.key):
                new.append(place.block)
        return end, new

    # ------------------------------------------------------------------ fingerprints

    def unhashed(self, blocks: Sequence[int]) -> list[int]:
        """Return those of named blocks whose fingerprint is not known."""
        return [block for block in blocks if block not in self._hashed]

    def hashed(self, blocks: Sequence[int], fingerprints: Any) -> None:
        """Record the fingerprints of blocks that were held meanwhile, [blocks, KV heads]."""
        self.cached.set_fingerprints(blocks, fingerprints)
        self._hashed.update(blocks)

    def bind(self, sequence: Chain, keys: Sequence[BlockKey], fingerprints: Sequence[bytes]) -> None:
        first = len(sequence.keys)
        super().bind(sequence, keys, fingerprints)
        self._hashed.update(sequence.blocks[first : first + len(keys)])

    def empty_fingerprints(self) -> Any:
        return np.empty((0, self.layout.kv_heads), np.uint64)
