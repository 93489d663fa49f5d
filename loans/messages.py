"""Messages of a loan, between the engine that borrows and the one that lends.

    borrower ── Want ─────▶ lender      opens the loan's channel
             ◀─ Started ───             everything is reserved
             ◀─ Blocks ────             as chunks are computed
             ── Release ──▶             these blocks are read
             ── close ────▶             the channel ends; so it does when the lender refuses, or the connection ends

`protos/loans.proto` is their form on the wire.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvcache.block_keys import BlockKey
from kvcache.items import Item


class PlacementMark(NamedTuple):
    """The placement that caused a piece of work, by router and number; echoed in load reports."""

    router_id: str = ""
    sequence: int = 0


NO_MARK = PlacementMark()


class Peer(NamedTuple):
    """An engine, as others reach it."""

    worker_id: str
    address: str
    """Address at which it takes loans; empty for an engine of another version, which lends this one nothing."""
    incarnation: bytes


class Lender(NamedTuple):
    """The engine that a request borrows from, and what it may do for it."""

    peer: Peer
    may_compute: bool = True
    """Whether it may compute blocks that it lacks; otherwise it lends only what it holds."""
    source: Peer | None = None
    """Engine that holds more of the chain, from which the lender borrows before it computes."""
    reads_store: bool = False
    """Whether the placement counts on blocks that the lender reads from the store that workers share."""


class Want(NamedTuple):
    """Request for blocks [first_block, len(keys)) of a chain."""

    request_id: str
    """The client's request id, for logs."""
    keys: Sequence[BlockKey]
    """Keys of the chain's blocks up to the last wanted one."""
    first_block: int
    may_compute: bool
    token_ids: Sequence[int]
    """Tokens of these blocks, and those after them that draft layers or a last item need."""
    root: BlockKey
    priority: int = 0
    adapter: bytes = b""
    """Fingerprint of the LoRA adapter; empty for none."""
    mark: PlacementMark = NO_MARK
    source: Peer | None = None
    """Engine from which the lender borrows before it computes."""
    reads_store: bool = False
    items: tuple[Item, ...] = ()
    """Items that begin among the blocks' tokens, in order of their places; `token_ids` has all tokens of each."""
    only_counts: bool = False
    """Whether the borrower only asks how many of the blocks are there; `Started` is the whole answer."""


class Started(NamedTuple):
    """The lender has reserved everything; blocks [first_block, end_block) will be announced."""

    end_block: int
    cached_end_block: int
    queued_ms: float
    num_waiting: int = 0
    """Number of loans, or of requests, that wait for capacity there."""


class Blocks(NamedTuple):
    """The next blocks may be read."""

    first: int
    block_ids: tuple[int, ...]
    fingerprints: bytes
    fetched: bool = False
    """Whether they came to the lender from elsewhere, instead of being computed there."""


class Release(NamedTuple):
    """Blocks [first, first + num_blocks) of the range were read, or will not be."""

    first: int
    num_blocks: int


Lent = Started | Blocks
"""Message of a lender."""
