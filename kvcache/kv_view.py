"""Protocol of an engine's KV as requests and loans use it.

Each engine has its own, over a pool of its own; steps in the life of a sequence's blocks are equal for all.

A *boundary* is a number of leading blocks of a chain after which a request can go on. A block range has the blocks that
a chain needs up to a boundary, in the order in which a loan brings them. With one KV group a boundary needs every block
before it, so a block range is the chain itself. With several groups (sliding windows, recurrent states) it needs all
blocks of full attention, the last ones of each window, and one state; `engine/backends/vllm/kv/groups.py` knows which.
"""

from collections.abc import Sequence
from typing import Protocol

from kvcache.block_keys import BlockKey, block_keys
from kvcache.cached_blocks import CachedBlocks, StoreBelow
from kvcache.chain import BlockRange, Chain
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


class KvView(Protocol):
    """Blocks of sequences, and the cached blocks of the engine's pool."""

    @property
    def cached(self) -> CachedBlocks: ...

    @property
    def in_step(self) -> bool:
        """Whether a step is writing into blocks."""

    @property
    def resumes_at_boundaries(self) -> bool:
        """Whether a request can go on only after some of the cached blocks of its chain."""

    @property
    def lingering(self) -> Sequence[Chain]:
        """Sequences that are over and keep their blocks until a step ends."""

    def usable_keys(self, sequence: Chain) -> list[BlockKey]:
        """Return the keys of the sequence's full blocks that may come from elsewhere.

        Blocks whose logits are needed here are excluded, so the block of the last token always is.
        """

    def num_cached(self, keys: Sequence[BlockKey]) -> int:
        """Return the last boundary within `keys` at which a request can go on from cached blocks."""

    def start(self, sequence: Chain, keys: Sequence[BlockKey], num_total_blocks: int) -> bool:
        """Give `sequence` the cached blocks of `keys` and reserve the rest; return False when they do not fit now."""

    def range_of(self, sequence: Chain, keys: Sequence[BlockKey]) -> BlockRange:
        """Return the blocks that a started sequence needs from its cached ones to the last of `keys`."""

    def range_between(self, keys: Sequence[BlockKey], first: int, end: int) -> BlockRange:
        """Return the blocks of a chain from the boundary `first` to the last one within `keys[:end]`."""

    def cut(self, sequence: Chain, block_range: BlockRange, end: int) -> BlockRange:
        """Return a sequence's blocks to an earlier boundary, at which its loan ends."""

    def stored_range(self, sequence: Chain, block_range: BlockRange, below: StoreBelow) -> BlockRange:
        """Return a sequence's blocks to the last boundary that a store seems to have."""

    def wait_for_loan(self, sequence: Chain) -> None:
        """Process that a sequence waits for a loan, perhaps its second one, and is not computed meanwhile."""

    def grow_to(self, sequence: Chain, num_blocks: int) -> None:
        """Allocate blocks from the sequence's reservation until it has `num_blocks`."""

    def bind(self, sequence: Chain, keys: Sequence[BlockKey], fingerprints: Sequence[bytes]) -> None:
        """Add the sequence's next blocks, which arrived from elsewhere and were verified."""

    def quarantine_unbound(self, sequence: Chain, indices: Sequence[int], replace: bool) -> bool:
        """Quarantine the sequence's blocks at chain `indices`; with `replace`, give it others in their place.

        Returns False when there are no others: the chain has holes then, and the sequence can only be finished.
        """

    def prompt_names(self, sequence: Chain) -> list[BlockKey]:
        """Return the names of the blocks with which a request could go on after the sequence's prompt."""

    def finish(self, sequence: Chain) -> None:
        """Release all blocks of the sequence; those that a step is writing into, when it ends."""
