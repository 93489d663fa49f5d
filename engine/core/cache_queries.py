"""Answers to operators' questions about the cache: what it holds, and the dropping of pins and cached blocks.

A dropped block is forgotten, not evicted: it goes to no tier and to no store. Blocks that somebody holds stay. A query
for all blocks drops at most MAX_DROPPED, since the loop does nothing else meanwhile; its answer says whether any are
left.
"""

from collections.abc import Callable, Sequence
from itertools import islice

from engine.block_keys import BlockKey, block_keys, root_key
from engine.kv.kv_cache_manager import KVCacheManager
from engine.lending.loan import Posted, StoreRemoved
from engine.messages.from_engine import CacheInspected, FromEngine
from engine.messages.to_engine import CacheDrop, InspectCache

MAX_DROPPED = 4096
"""Largest number of blocks that a query for all blocks drops, of the pool and the tiers together."""


class CacheQueries:
    """Answers of one engine; called by its loop."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        model_fingerprint: bytes,
        emit: Callable[[FromEngine], None],
        post: Callable[[Posted], None],
    ) -> None:
        """Create the answers; `post` hands a message of another thread to the loop."""
        self._kv_cache = kv_cache
        self._model_fingerprint = model_fingerprint
        self._emit = emit
        self._post = post

    def answer(self, query: InspectCache) -> None:
        """Send what the pool holds, after dropping pins and blocks if the query says so.

        Where objects of the shared store are removed, the answer comes when they are.
        """
        kv_cache, drop = self._kv_cache, query.drop
        dropped_pins = kv_cache.pins.clear(query.tenant) if query.drop_pins else 0
        in_pool = in_tiers = in_use = 0
        is_whole, refused, keys = True, "", None
        if drop is not None and not (refused := self._refusal(drop)):
            keys = None if drop.token_ids is None else self._keys_of(drop, drop.token_ids)
            in_pool, in_tiers, in_use, is_whole = drop_cached(kv_cache, keys)
        pool, pins = kv_cache.pool, kv_cache.pins
        inspected = CacheInspected(
            query.query_id,
            pool.num_blocks,
            pool.num_held,
            pool.num_filled,
            pins.max_blocks,
            tuple(pins.by_tenant()),
            dropped_pins,
            dropped_in_pool=in_pool,
            dropped_in_tiers=in_tiers,
            in_use=in_use,
            is_whole=is_whole,
            refused=refused,
        )
        if drop is None or refused or not drop.store:
            self._emit(inspected)
            return
        assert kv_cache.store is not None
        assert keys is not None
        kv_cache.store.remove(keys, lambda removed, why: self._post(StoreRemoved(inspected, removed, why)))

    def removed(self, done: StoreRemoved) -> None:
        """Send the answer that waited for the shared store."""
        self._emit(done.inspected._replace(removed_objects=done.num_objects, store_failure=done.failure))

    def _keys_of(self, drop: CacheDrop, token_ids: Sequence[int]) -> list[BlockKey]:
        """Return the keys of the full blocks of a prompt."""
        root = root_key(self._model_fingerprint, drop.cache_salt, drop.adapter)
        return block_keys(root, token_ids, self._kv_cache.layout.block_tokens)

    def _refusal(self, drop: CacheDrop) -> str:
        """Return why objects cannot be removed; empty where these can, or need not be."""
        if not drop.store:
            return ""
        store = self._kv_cache.store
        if store is None:
            return "this worker has no kv_store"
        return store.keeps_objects


def drop_cached(kv_cache: KVCacheManager, keys: Sequence[BlockKey] | None) -> tuple[int, int, int, bool]:
    """Drop the cached blocks of these names, or of all, from the pool and the tiers below it.

    Returns the numbers of blocks that were dropped from the pool and only from tiers, the number of those named blocks
    that stay because they are in use, and whether none is left to be dropped.
    """
    pool, tiers = kv_cache.pool, kv_cache.tiers
    if keys is None:
        from_pool = pool.drop_idle(pool.idle_keys(MAX_DROPPED))
        left = MAX_DROPPED - len(from_pool)
        named = [] if tiers is None else list(islice((key for key in tiers.held_keys() if key not in pool), left))
        is_whole = len(from_pool) + len(named) < MAX_DROPPED
        in_use = pool.num_named_held
    else:
        from_pool, named = pool.drop_idle(keys), list(keys)
        is_whole, in_use = True, sum(key in pool for key in keys)
    gone = 0
    if tiers is not None:
        tiers.drop(from_pool, is_reported=True)
        gone = tiers.drop([key for key in named if key not in pool])
    return len(from_pool), gone, in_use, is_whole
