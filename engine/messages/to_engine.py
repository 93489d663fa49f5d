"""Messages from a front to its engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.core_types import SamplingParams, StepBudget
from engine.media.encoder import Embeddings
from kvcache.items import Item
from kvcache.pins import Retention


class PlacementMark(NamedTuple):
    """The placement that caused a piece of work, by router and number; echoed in load reports."""

    router_id: str = ""
    sequence: int = 0


class Generate(NamedTuple):
    """Serve a request: admit it at once or answer Rejected.

    With `borrow`, open a loan for the missing blocks.
    """

    request_id: str
    prompt: Sequence[int]
    emitted: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    priority: int
    borrow: bool
    mark: PlacementMark = PlacementMark()
    lender_computes: bool = True
    """Whether the lender may compute blocks it lacks; otherwise it lends only what it holds."""
    emitted_others: tuple[tuple[int, ...], ...] = ()
    """Emitted tokens of choices 1, 2 and so on, like `emitted`; missing entries are empty."""
    finished: frozenset[int] = frozenset()
    """Choices that an earlier attempt finished."""
    num_scored: int = 0
    """Prompt tokens whose log probabilities an earlier attempt returned."""
    adapter: bytes = b""
    """Fingerprint of the LoRA adapter; empty for none."""
    retention: Retention | None = None
    """Time for which the prompt's blocks are pinned; None for none."""
    reads_store: bool = False
    """Whether the placement counts on blocks in the shared store."""
    to_store: bool = False
    """Whether a request without output, of max_tokens 0, also writes its blocks to the shared store."""
    reserve_output_tokens: int = 0
    """Output tokens that each choice is expected to have yet, for which it reserves blocks, as far as the engine's
    setting goes; 0: unknown."""
    items: tuple[Item, ...] = ()
    """Items of the prompt, in order of their places."""

    def emitted_of(self, choice: int) -> tuple[int, ...]:
        """Return the tokens that an earlier attempt emitted of `choice`."""
        if choice == 0:
            return self.emitted
        return self.emitted_others[choice - 1] if choice <= len(self.emitted_others) else ()


class Cancel(NamedTuple):
    """End the request, or one choice of it, and free its blocks.

    No answer.
    """

    request_id: str
    choice: int | None = None
    """Choice to end; None ends all."""


class LoanStarted(NamedTuple):
    request_id: str
    endpoint: bytes
    end_block: int
    cached_end_block: int
    queued_ms: float


class LoanBlocks(NamedTuple):
    request_id: str
    first: int
    block_ids: tuple[int, ...]
    fingerprints: bytes
    fetched: bool = False


class LenderSilent(NamedTuple):
    """Nothing was heard from the loan's lender for `silent_s` seconds, heartbeats included; repeated while it lasts."""

    request_id: str
    silent_s: float


class LoanFailed(NamedTuple):
    """The loan's stream ended before the borrower closed it."""

    request_id: str
    reason: str


class Lend(NamedTuple):
    """Lend blocks [first_block, `num_blocks`) to a borrower."""

    loan_id: str
    token_ids: Sequence[int]
    first_block: int
    cache_salt: str
    may_compute: bool
    priority: int
    mark: PlacementMark = PlacementMark()
    borrow: bool = False
    """Whether a source is named that holds more of the chain: borrow from it before computing."""
    fast_path: bytes = b""
    """Address for fast-path announcements, see `loans/fast_path.py`; empty for none."""
    adapter: bytes = b""
    """Fingerprint of the LoRA adapter; empty for none."""
    reads_store: bool = False
    """Whether the placement counts on blocks that this engine reads from the shared store."""
    items: tuple[Item, ...] = ()
    """Items that begin among the blocks' tokens, in order of their places; `token_ids` has all tokens of each."""
    end_block: int = 0
    """Number of the block after the last wanted one, where `token_ids` go on to the end of an item; 0: they do not."""

    def num_blocks(self, block_tokens: int) -> int:
        """Return the number of blocks up to the last wanted one."""
        return self.end_block or len(self.token_ids) // block_tokens


class LendReleased(NamedTuple):
    loan_id: str
    first: int
    num_blocks: int


class LendClosed(NamedTuple):
    loan_id: str


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Send the whole prefix cache as one CacheChanged."""


class ItemsFetched(NamedTuple):
    """Answer to ItemsWanted."""

    request_id: str
    choice: int
    blobs: tuple[tuple[bytes, bytes], ...] = ()
    """Identifiers and blobs."""
    embeddings: tuple[tuple[bytes, Embeddings], ...] = ()
    """Identifiers and embeddings, of items whose encode worker has answered."""
    failure: str = ""
    """Reason why there are none; empty where there are."""


class SetBudget(NamedTuple):
    """Use another step budget from now on, because the worker's role has changed."""

    budget: StepBudget


class CorruptReads(NamedTuple):
    """Flip a bit in each of the next `num_blocks` blocks that arrive, before they are verified; 0 ends it. For drills.

    Only for engines of one rank whose blocks can be written, which `engine/worker/front/faults.py` checks.
    """

    num_blocks: int


class CacheDrop(NamedTuple):
    """Blocks to drop from the pool and the local store, unless they are in use."""

    token_ids: Sequence[int] | None
    """Prompt whose full blocks are dropped; None: all blocks, a limited number at a time."""
    cache_salt: str = ""
    adapter: bytes = b""
    """Fingerprint of the LoRA adapter; empty for none."""
    store: bool = False
    """Whether the prompt's objects in the shared store are removed, too."""


class InspectCache(NamedTuple):
    """Answer CacheInspected, after dropping pins, those of `tenant` or all with None, and then blocks."""

    query_id: int
    drop_pins: bool = False
    tenant: str | None = None
    drop: CacheDrop | None = None


class Audit(NamedTuple):
    """Check the block pool's records against every holder and answer Audited."""

    audit_id: int


class Connect(NamedTuple):
    """Connect to another worker's KV memory, by a read of one block that is thrown away, and answer Connected."""

    query_id: int
    endpoint: bytes


class DrainGroup(NamedTuple):
    """The worker drains, so all of its data-parallel group must; it goes on to step with them."""

    is_empty: bool
    """Whether its requests and loans are over."""


ToEngine = (
    Generate
    | Cancel
    | LoanStarted
    | LoanBlocks
    | LenderSilent
    | LoanFailed
    | ItemsFetched
    | Lend
    | LendReleased
    | LendClosed
    | TakeSnapshot
    | SetBudget
    | CorruptReads
    | Audit
    | InspectCache
    | Connect
    | DrainGroup
)
