"""Blocks that a chain needs up to a boundary, in the order in which a loan brings them.

A *boundary* is a number of leading blocks of a chain after which a request can go on. With one KV group a boundary
needs every block before it, so a block range is the chain itself. With several groups (sliding windows, recurrent
states) it needs all blocks of full attention, the last ones of each window, and one state;
`engine/backends/vllm/kv/groups.py` knows which.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from kvcache.block_keys import KEY_BYTES, BlockKey


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks from one boundary of a chain to a later one. Both ends of a loan compute it from the same keys.

    Positions count its blocks: those of the first boundary are [0, start), those to be brought [start, len(names)).
    """

    first: int
    """Boundary at which it begins, in blocks of the chain."""
    end: int
    """Boundary at which it ends, in blocks of the chain."""
    start: int
    """Number of blocks that the first boundary needs."""
    names: list[BlockKey]
    """Names by position."""

    def cut(self, end: int) -> "BlockRange":
        """Return the range to the earlier boundary `end`."""
        return BlockRange(self.first, end, self.start, self.names[:end])

    def num_chain_blocks(self, first: int, end: int) -> int:
        """Return how many blocks of the chain positions [first, end) are; each counts once, whatever its groups."""
        return end - first


def chain_range(keys: Sequence[BlockKey], first: int, end: int) -> BlockRange:
    """Return a range of a chain with one KV group."""
    return BlockRange(first, end, first, list(keys[:end]))


class GroupBlock(NamedTuple):
    """Block of a chain in one group."""

    end: int
    """Number of keys up to and with its own."""
    group: int
    key: BlockKey
    """Key of the chain at its end."""
    name: BlockKey
    before: BlockKey
    """Key at the end of the group's block before it; empty for the first one."""


@lru_cache(maxsize=1 << 16)
def name_of(key: BlockKey, group: int) -> BlockKey:
    """Return the name of a block of another group than the chain's."""
    return blake2b(key, digest_size=KEY_BYTES, person=b"group %d" % group).digest()
