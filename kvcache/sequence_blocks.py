"""Steps in the life of a sequence's blocks that are equal for every engine's pool."""

from collections.abc import Sequence

from kvcache.block_keys import BlockKey, block_keys
from kvcache.cached_blocks import CachedBlocks
from kvcache.chain import Chain
from kvcache.pool import KvPool


def usable_keys(sequence: Chain, block_tokens: int) -> list[BlockKey]:
    """Return the keys of a sequence's full blocks that may come from elsewhere: not those whose logits are needed."""
    end = sequence.num_reusable // block_tokens * block_tokens
    return block_keys(sequence.root, sequence.token_ids[:end], block_tokens, sequence.items)


def start_chain(cached: CachedBlocks, sequence: Chain, keys: Sequence[BlockKey], num_total_blocks: int) -> bool:
    """Give `sequence` the cached blocks of a chain and reserve the rest; return False when they do not fit now."""
    pool = cached.pool
    hits = pool.match(keys)
    if not pool.reserve_with(hits, num_total_blocks - len(hits)):
        if not cached.pins.give_way(num_total_blocks):
            return False
        hits = pool.match(keys)
        if not pool.reserve_with(hits, num_total_blocks - len(hits)):
            return False
    sequence.blocks = list(hits)
    sequence.keys = list(keys[: len(hits)])
    sequence.num_reserved = num_total_blocks - len(hits)
    sequence.num_computed = len(hits) * cached.layout.block_tokens
    return True


def quarantine_unbound(pool: KvPool, sequence: Chain, indices: Sequence[int], replace: bool) -> bool:
    """Quarantine the sequence's blocks at chain `indices`; with `replace`, give it others in their place.

    Returns False where there are no others: the chain has holes then.
    """
    lost = [sequence.blocks[index] for index in indices]
    replaced = replace and pool.reserve_with((), len(lost))
    if replaced:
        for index, block in zip(indices, pool.allocate(len(lost)), strict=True):
            sequence.blocks[index] = block
    else:
        sequence.blocks = [block for block in sequence.blocks if block not in lost]
    pool.quarantine(lost)
    return replaced
