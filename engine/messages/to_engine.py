"""Messages from a front to its engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.core_types import SamplingParams, StepBudget
from engine.media import Embeddings
from kvcache.block_keys import BlockKey
from kvcache.items import Item
from kvcache.pins import Retention
from loans.network import NO_MARK, Lender, Peer, PlacementMark


class Generate(NamedTuple):
    """Serve a request: admit it at once or answer Rejected.

    Missing blocks are borrowed from `lender`, if there is one.
    """

    request_id: str
    prompt: Sequence[int]
    emitted: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    priority: int
    lender: Lender | None
    mark: PlacementMark = NO_MARK
    keys: tuple[BlockKey, ...] = ()
    """Keys of the prompt's first full blocks, as far as the router sent them."""
    log_id: str = ""
    """The client's request id, for logs."""
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

    Only for engines of one rank whose blocks can be written, which `worker/front/faults.py` checks.
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


class ConnectPeers(NamedTuple):
    """Connect to other engines and their KV memory before the first loan, and answer Connected."""

    query_id: int
    peers: tuple[Peer, ...]


class DrainLoans(NamedTuple):
    """Refuse new loans that compute, or take them again. Cached blocks are lent until the end."""

    is_draining: bool


class EndLoans(NamedTuple):
    """End all loans given."""


class CutOffPeer(NamedTuple):
    """Break the connections with a worker's engine, and refuse new ones for so long, in a drill."""

    worker_id: str
    seconds: float


class DelayLoans(NamedTuple):
    """Delay what is sent to other engines, for so long, in a drill."""

    delay_s: float
    seconds: float


class DrainGroup(NamedTuple):
    """The worker drains, so all of its data-parallel group must; it goes on to step with them."""

    is_empty: bool
    """Whether its requests and loans are over."""


ToEngine = (
    Generate
    | Cancel
    | ItemsFetched
    | TakeSnapshot
    | SetBudget
    | CorruptReads
    | Audit
    | InspectCache
    | ConnectPeers
    | DrainLoans
    | EndLoans
    | CutOffPeer
    | DelayLoans
    | DrainGroup
)
