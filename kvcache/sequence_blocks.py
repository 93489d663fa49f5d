"""Steps in the life of a sequence's blocks that are equal for every engine's pool."""

from collections.abc import Sequence

from kvcache.block_keys import BlockKey, block_keys
from kvcache.cached_blocks import CachedBlocks
from kvcache.chain import Chain
from kvcache.items import Item
from kvcache.pool import KvPool


def usable_keys(sequence: Chain, block_tokens: int) -> list[BlockKey]:
    """Return the keys of a sequence's full blocks that may come from elsewhere: not those whose logits are needed."""
    return leading_keys(sequence, sequence.num_reusable // block_tokens, block_tokens)


def leading_keys(sequence: Chain, num_blocks: int, block_tokens: int) -> list[BlockKey]:
    """Return the keys of a sequence's first full blocks, of which those that came with the request are not hashed."""
    given = list(sequence.given_keys[:num_blocks])
    start, end = len(given) * block_tokens, num_blocks * block_tokens
    parent = given[-1] if given else sequence.root
    return given + block_keys(parent, sequence.token_ids[start:end], block_tokens, sequence.items, start)


def belongs(
    keys: Sequence[BlockKey], root: BlockKey, token_ids: Sequence[int], block_tokens: int, items: Sequence[Item]
) -> bool:
    """Return whether keys that came from elsewhere are of this root; the first tells, since each has its parent's."""
    return not keys or block_keys(root, token_ids[:block_tokens], block_tokens, items) == [keys[0]]


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
