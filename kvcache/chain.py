"""A token chain whose KV is in blocks of a pool."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from kvcache.block_keys import KEY_BYTES, BlockKey
from kvcache.items import Item


@dataclass(slots=True, eq=False, weakref_slot=True)
class Chain:
    """A token chain whose KV is computed here, or comes from elsewhere.

        token_ids   [0 ........ num_prompt ........ num_tokens)
        KV          [0 .. num_computed)                          in `blocks`
        named       [0 .. num_published blocks)                  in `keys`

    `num_prompt` counts given tokens. A chain that is nothing else has no output: its KV is computed for a loan.
    """

    request_id: str
    token_ids: list[int]
    num_prompt: int
    root: BlockKey
    priority: int
    arrival: int
    blocks: list[int] = field(default_factory=list)
    num_reserved: int = 0
    num_computed: int = 0
    keys: list[BlockKey] = field(default_factory=list)
    turn: int = 0
    """Position among chains that wait for their next token; a lower one waits longer. See
    `engine/core/engine_core.py`."""
    adapter: bytes = b""
    """Fingerprint of the LoRA adapter that computes it; empty for none."""
    hedged: bool = False
    """Whether it is computed although its loan is open, because the lender is silent."""
    tail: tuple[int, ...] = ()
    """Tokens after the last one, where a chain without output has them. Draft layers make the KV of a token from the
    one after it, and an item may go on."""
    items: tuple[Item, ...] = ()
    """Items among its tokens, in order of their places; the last one may end in `tail`."""
    held_at: int | None = None
    """Number of leading tokens that a hedged chain may compute: blocks after them are being read."""
    given_keys: tuple[BlockKey, ...] = ()
    """Keys of its first full blocks that came with the request, so that they need no hashing here."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens_with_items(self) -> int:
        """Number of its tokens, with all tokens of an item that ends in `tail`."""
        return max(len(self.token_ids), self.items[-1].end) if self.items else len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """Number of tokens whose KV is not computed yet and may be computed now."""
        return max(0, len(self.token_ids) - self.num_computed)

    @property
    def num_reusable(self) -> int:
        """Number of leading tokens whose KV may come from elsewhere, because their logits are not needed here."""
        return len(self.token_ids)


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
