"""Answers to operators' questions about the cache: what it holds, and the dropping of pins and cached blocks.

A dropped block is forgotten, not evicted: it goes to no store. Blocks that somebody holds stay. A query
for all blocks drops at most MAX_DROPPED, since the loop does nothing else meanwhile; its answer says whether any are
left.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from engine.messages.from_engine import CacheInspected, FromEngine
from engine.messages.to_engine import (
    CacheDrop,
    InspectCache,
)
from kvcache.block_keys import BlockKey, block_keys, root_key
from kvcache.cached_blocks import CachedBlocks
from loans.loan import Post

log = logging.getLogger(__name__)
MAX_DROPPED = 4096
"""Largest number of blocks that a query for all blocks drops, of the pool and the local store together."""


class CacheQueries:
    """Answers of one engine; called by its loop."""

    def __init__(
        self,
        cached: CachedBlocks,
        model_fingerprint: bytes,
        emit: Callable[[FromEngine], None],
        post: Post,
    ) -> None:
        """Create the answers."""
        self._cached = cached
        self._model_fingerprint = model_fingerprint
        self._emit = emit
        self._post = post

    def answer(self, query: InspectCache) -> None:
        """Send what the pool holds, after dropping pins and blocks if the query says so.

        Where blocks in stores are removed, the answer comes when they are: no later request finds them.
        """
        cached, drop = self._cached, query.drop
        dropped_pins = cached.pins.clear(query.tenant) if query.drop_pins else 0
        in_pool = in_tiers = in_use = 0
        is_whole, refused, keys = True, "", None
        stored: list[BlockKey] = []
        if drop is not None and not (refused := self._refusal(drop)):
            keys = None if drop.token_ids is None else self._keys_of(drop, drop.token_ids)
            in_pool, in_tiers, in_use, is_whole, stored = drop_cached(cached, keys)
        pool, pins = cached.pool, cached.pins
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
        from_shared = keys if drop is not None and drop.store and not refused else None

        def remove_shared() -> None:
            if from_shared is None:
                self._emit(inspected)
            else:
                assert cached.shared is not None
                cached.shared.store.remove(from_shared, lambda *removed: self._post(partial(answered, *removed)))

        def answered(num_objects: int, failure: str) -> None:
            self._emit(inspected._replace(removed_objects=num_objects, store_failure=failure))

        def local_removed(num_removed: int, failure: str) -> None:
            if failure:
                log.warning("dropped blocks stay in the local store: %s", failure)
            self._post(remove_shared)

        if stored:
            assert cached.local is not None
            cached.local.store.remove(stored, local_removed)
        else:
            remove_shared()

    def _keys_of(self, drop: CacheDrop, token_ids: Sequence[int]) -> list[BlockKey]:
        """Return the keys of the full blocks of a prompt."""
        root = root_key(self._model_fingerprint, drop.cache_salt, drop.adapter)
        return block_keys(root, token_ids, self._cached.layout.block_tokens)

    def _refusal(self, drop: CacheDrop) -> str:
        """Return why objects cannot be removed; empty where these can, or need not be."""
        if not drop.store:
            return ""
        below = self._cached.shared
        return "this worker has no kv_store" if below is None else below.store.keeps_objects


def drop_cached(cached: CachedBlocks, keys: Sequence[BlockKey] | None) -> tuple[int, int, int, bool, list[BlockKey]]:
    """Drop the cached blocks of these names, or of all, from the pool, and choose those of the local store below it.

    Returns the numbers of blocks that were dropped from the pool and that are only in the store, the number of those
    named blocks that stay because they are in use, whether none is left to be dropped, and what the store must remove.
    """
    pool, store = cached.pool, cached.local.store if cached.local is not None else None
    if keys is None:
        from_pool = pool.drop_idle(pool.idle_keys(MAX_DROPPED))
        stored = [] if store is None else [key for key in store.known_keys() if key not in pool]
        stored = stored[: MAX_DROPPED - len(from_pool)]
        is_whole = len(from_pool) + len(stored) < MAX_DROPPED
        in_use = pool.num_named_held
    else:
        from_pool = pool.drop_idle(keys)
        known = set() if store is None else set(store.known_keys())
        stored = [key for key in keys if key in known and key not in pool]
        is_whole, in_use = True, sum(key in pool for key in keys)
    only_stored = set(stored).difference(from_pool)
    gone = [] if store is None else list(dict.fromkeys([*from_pool, *stored]))
    return len(from_pool), len(only_stored), in_use, is_whole, gone
