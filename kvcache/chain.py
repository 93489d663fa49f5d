"""A token chain whose KV is in blocks of a pool."""

from dataclasses import dataclass, field

from kvcache.block_keys import BlockKey
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
    `engine/core/scheduler.py`."""
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
