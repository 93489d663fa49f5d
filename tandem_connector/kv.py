"""KV of a stock vLLM engine, as loans use it: blocks of vLLM's own pool under Tandem's names.

Names of the blocks of vLLM's requests: Tandem's keys, and vLLM's own hashes of the same blocks.

Keys are equal in all servers. They cover tokens, model, adapter, cache salt and items, so nobody names another tenant's
blocks without knowing the salt. vLLM's hashes are those of one process and serve its own prefix cache only.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import BlockHash

from engine.backends.vllm.kv.block_pool import GroupPlace
from engine.backends.vllm.kv.cache import VllmKVCache
from engine.backends.vllm.kv.groups import KvGroups
from engine.backends.vllm.kv.memory import KvMemory
from engine.errors import EngineStartError
from engine.model.adapters import read_adapters
from kvcache.block_keys import BlockKey, block_keys, root_key
from kvcache.chain import Chain
from kvcache.items import IDENTIFIER_BYTES, Item, items_fault

log = logging.getLogger(__name__)


class Hashes:
    """vLLM's hashes of the keys that this process has seen."""

    def __init__(self) -> None:
        self._hashes: dict[BlockKey, BlockHash] = {}
        self._is_in_use: Callable[[BlockKey], bool] = lambda key: True
        self._most = sys.maxsize

    def bound(self, is_in_use: Callable[[BlockKey], bool], most: int) -> None:
        """Forget keys that are not `is_in_use` whenever there are more than `most`."""
        self._is_in_use, self._most = is_in_use, most

    def of(self, key: BlockKey) -> BlockHash:
        """Return the hash of a key; for an unknown one a hash that no block has."""
        return self._hashes.get(key) or BlockHash(key)

    def learn(self, keys: Sequence[BlockKey], hashes: Sequence[BlockHash]) -> None:
        """Record the hashes of the first keys of a chain."""
        self._hashes.update(zip(keys, hashes, strict=False))
        if len(self._hashes) > self._most:
            new = set(keys)
            self._hashes = {k: h for k, h in self._hashes.items() if k in new or self._is_in_use(k)}


class RequestNames:
    """Keys of one request's full blocks, each hashed once."""

    def __init__(self, request: Any, root: BlockKey, items: tuple[Item, ...], adapter: bytes, unit: int) -> None:
        self.request = request
        self.root = root
        self.items = items
        self.adapter = adapter
        """Fingerprint of the LoRA adapter; empty for none."""
        self._unit = unit
        self._keys: list[BlockKey] = []

    def upto(self, count: int) -> list[BlockKey]:
        """Return the keys of the first `count` full blocks."""
        known = len(self._keys)
        if count > known:
            start, parent = known * self._unit, self._keys[-1] if known else self.root
            tokens = self.request.all_token_ids[start : count * self._unit]
            self._keys += block_keys(parent, tokens, self._unit, self.items, start)
        return self._keys[:count]


class Naming:
    """Maker of the names of requests of one model."""

    def __init__(self, model_fingerprint: bytes, unit: int) -> None:
        self._model_fingerprint = model_fingerprint
        self._unit = unit
        self._adapters: dict[tuple[str, str], bytes | None] = {}
        """Fingerprints by name and path; None for an adapter that cannot be read."""

    def of(self, request: Any) -> RequestNames | None:
        """Return the names of a request; None for one whose blocks have none.

        These are prompts of embeddings, sessions whose input goes on, and media in no order.
        """
        if request.prompt_token_ids is None or request.prompt_embeds is not None or request.resumable:
            return None
        adapter = b""
        if (lora := request.lora_request) is not None:
            known = self._adapter(lora.lora_name, lora.lora_path)
            if known is None:
                return None
            adapter = known
        items = items_of(request.mm_features or ())
        if items_fault(items, request.num_prompt_tokens):
            return None
        root = root_key(self._model_fingerprint, request.cache_salt or "", adapter)
        return RequestNames(request, root, items, adapter, self._unit)

    def _adapter(self, name: str, path: str) -> bytes | None:
        if (name, path) not in self._adapters:
            try:
                (adapter,) = read_adapters({name: Path(path)})
                self._adapters[name, path] = adapter.fingerprint
            except EngineStartError as error:
                log.warning("requests of this adapter neither borrow nor lend: %s", error)
                self._adapters[name, path] = None
        return self._adapters[name, path]


def items_of(features: Sequence[Any]) -> tuple[Item, ...]:
    """Return vLLM's multimodal features of a request as items, in order of their places."""
    ordered = sorted(features, key=lambda feature: feature.mm_position.offset)
    return tuple(
        Item(_identifier(each.identifier), each.mm_position.offset, each.mm_position.length) for each in ordered
    )


def _identifier(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=IDENTIFIER_BYTES).digest()


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
        self.fingerprinted: set[int] = set()
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
                self.fingerprinted.discard(place.block)
            if self.pool.is_filled(place.block, place.key):
                new.append(place.block)
        return end, new

    # ------------------------------------------------------------------ fingerprints

    def unhashed(self, blocks: Sequence[int]) -> list[int]:
        """Return those of named blocks whose fingerprint is not known."""
        return [block for block in blocks if block not in self.fingerprinted]

    def hashed(self, blocks: Sequence[int], fingerprints: Any) -> None:
        """Record the fingerprints of blocks that were held meanwhile, [blocks, KV heads]."""
        self.cached.set_fingerprints(blocks, fingerprints)
        self.fingerprinted.update(blocks)

    def bind(self, sequence: Chain, keys: Sequence[BlockKey], fingerprints: Sequence[bytes]) -> None:
        first = len(sequence.keys)
        super().bind(sequence, keys, fingerprints)
        self.fingerprinted.update(sequence.blocks[first : first + len(keys)])

    def empty_fingerprints(self) -> Any:
        return np.empty((0, self.layout.kv_heads), np.uint64)
