"""Messages between a front and its engine process.

Plain data, batched per step. Most are named tuples, which are made and pickled several times as fast as dataclasses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core_types import FinishReason, RequestFailure, SamplingParams, StepBudget, TokenLogprobs
from engine.kv.block_pool import CacheEvent
from engine.kv.pins import Retention
from engine.weights.offer import WeightFile

# ----------------------------------------------------------------------------------------- to the engine


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
    """Lend blocks [first_block, len(token_ids) / block_tokens) to a borrower."""

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
    """Address for fast-path announcements, see `engine/lending/fast_path.py`; empty for none."""
    adapter: bytes = b""
    """Fingerprint of the LoRA adapter; empty for none."""
    reads_store: bool = False
    """Whether the placement counts on blocks that this engine reads from the shared store."""


class LendReleased(NamedTuple):
    loan_id: str
    first: int
    num_blocks: int


class LendClosed(NamedTuple):
    loan_id: str


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Send the whole prefix cache as one CacheChanged."""


class SetBudget(NamedTuple):
    """Use another step budget from now on, because the worker's role has changed."""

    budget: StepBudget


class CorruptReads(NamedTuple):
    """Flip a bit in each of the next `num_blocks` blocks that arrive, before they are verified; 0 ends it. For drills.

    Only for engines of one rank whose blocks can be written, which `engine/worker/faults.py` checks.
    """

    num_blocks: int


class CacheDrop(NamedTuple):
    """Blocks to drop from the pool and the tiers below it, unless they are in use."""

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


class LendWeights(NamedTuple):
    """Make the weight files readable for a borrower, and answer WeightsOffered."""

    borrower: int


class ReturnWeights(NamedTuple):
    """The borrower does not read weights any more."""

    borrower: int


ToEngine = (
    Generate
    | Cancel
    | LoanStarted
    | LoanBlocks
    | LenderSilent
    | LoanFailed
    | Lend
    | LendReleased
    | LendClosed
    | TakeSnapshot
    | SetBudget
    | CorruptReads
    | Audit
    | InspectCache
    | LendWeights
    | ReturnWeights
)

# --------------------------------------------------------------------------------------- from the engine


class Ready(NamedTuple):
    """The model is loaded and the pool registered."""

    endpoint: bytes
    transport: str
    model_fingerprint: bytes
    block_tokens: int
    block_bytes: int
    kv_heads: int
    num_blocks: int
    vocab_size: int
    max_context_tokens: int
    adapters: tuple[tuple[str, bytes], ...] = ()
    """Names and fingerprints of the loaded LoRA adapters."""
    store: str = ""
    """Identity of the shared store; empty without one."""
    weights_from_peer: bool = False
    """Whether the weights came from the peer that the start parameters offer."""


class StartFailed(NamedTuple):
    """The engine cannot start; its last message."""

    reason: str


@dataclass(slots=True)
class KvAccount:
    """Origin of one request's KV, and the times of its stages in seconds of the host's monotonic clock."""

    reused_blocks: int = 0
    moved_blocks: int = 0
    computed_blocks: int = 0
    computed_tokens: int = 0
    moved_bytes: int = 0
    mismatched_blocks: int = 0
    lender_cached_blocks: int = 0
    lender_computed_blocks: int = 0
    lender_fetched_blocks: int = 0
    restored_blocks: int = 0
    """Blocks restored from this engine's own tiers."""
    store_blocks: int = 0
    """Blocks fetched from the store that workers share."""
    transport: str = ""
    lanes: tuple[str, ...] = ()
    hedged_blocks: int = 0
    """Blocks computed here because the lender was silent, while its loan was open."""
    loan_failure: str = ""
    restore_failure: str = ""
    """Reason why restoring from the tiers ended early."""
    store_failure: str = ""
    """Reason why fetching from the shared store ended early."""
    pinned_blocks: int = 0
    """Blocks of the prompt that stay in the pool, as the request asked."""
    stored_blocks: int = 0
    """Blocks of a request without output that the shared store has, or is being given."""
    preemptions: int = 0
    """Number of times the request was preempted and its tokens computed again."""
    recomputed_tokens: int = 0
    """Tokens computed again because they were no longer cached after a preemption; `computed_tokens` excludes them."""
    times: dict[str, float] = field(default_factory=dict)


class Token(NamedTuple):
    request_id: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    account: KvAccount | None = None
    """Account of the request; set with its first token, and with the first token after a preemption."""
    finish: FinishReason | None = None
    """Reason of the end; set with the last token of the choice."""
    choice: int = 0
    cumulative_logprob: float | None = None
    """Log probability of a whole beam; set with its last token."""
    drafted: int = 0
    """Number of draft tokens that the step verified; set with the first token of a step."""
    followed_draft: bool = False
    """Whether the token was sampled in the same step as the one before it, because that one was a correct draft."""


class PromptScored(NamedTuple):
    """Requested log probabilities of the next prompt tokens, in order."""

    request_id: str
    logprobs: tuple[TokenLogprobs, ...]


class Embedded(NamedTuple):
    """The request's embedding, before scaling; the request is over."""

    request_id: str
    vector: bytes
    """The pooled hidden state, float32."""
    account: KvAccount


class Filled(NamedTuple):
    """The blocks of a request without output are cached; the request is over."""

    request_id: str
    account: KvAccount


class Rejected(NamedTuple):
    """The request is over without a (further) token.

    `permanent`: it can never fit here. Otherwise it does not fit now, or lost blocks to a silent peer.
    """

    request_id: str
    reason: str
    permanent: bool


class Failed(NamedTuple):
    """The request is over without a further token through its own fault; every worker would fail it."""

    request_id: str
    failure: RequestFailure


class OpenLoan(NamedTuple):
    """Ask a lender for chain blocks [first_block, end_block), for a request or for a loan given."""

    request_id: str
    first_block: int
    end_block: int
    may_compute: bool
    fast_path: bytes = b""
    """Address for fast-path announcements, as in Lend."""


class ReleaseLoan(NamedTuple):
    request_id: str
    first: int
    num_blocks: int


class CloseLoan(NamedTuple):
    request_id: str


class LendStarting(NamedTuple):
    loan_id: str
    end_block: int
    cached_end_block: int
    queued_ms: float


class LendReady(NamedTuple):
    loan_id: str
    first: int
    block_ids: tuple[int, ...]
    fingerprints: bytes
    fetched: bool = False
    """Whether the blocks were borrowed or restored from a tier instead of computed here."""


class LendRefused(NamedTuple):
    """The loan is over.

    `bad_request`: the borrower broke the protocol; otherwise there is no capacity.
    """

    loan_id: str
    reason: str
    bad_request: bool


class CacheChanged(NamedTuple):
    """Changes of the prefix cache.

    `sequence` numbers the first event. A snapshot replaces all earlier changes.
    """

    sequence: int
    events: tuple[CacheEvent, ...]
    snapshot: bool = False


class TierUse(NamedTuple):
    """Use of one KV tier, in blocks; see `engine/kv/kv_stats.py`."""

    tier: str
    blocks: int
    """Capacity in blocks; 0 for blocks of other workers."""
    used: int
    """Blocks that hold KV, in use or cached."""
    queries: int
    hits: int


class KvUse(NamedTuple):
    """Use of all KV tiers; counters start with the engine."""

    tiers: tuple[TierUse, ...]
    read_bytes: int
    """Verified bytes read from other workers."""
    read_s: float
    """Seconds during which reads from other workers were in flight."""
    mismatched: int
    store: tuple[tuple[str, int], ...] = ()
    """Blocks of the shared store, by what became of them: see `StoreCounts` of `engine/kv/store/block_store.py`."""


class Load(NamedTuple):
    """Load report, sent by the step loop several times a second; its absence means a hung engine."""

    step: int
    running: int
    loans: int
    queued_loans: int
    queued_prefill_tokens: int
    available_blocks: int
    num_blocks: int
    placements_seen: dict[str, int]
    preempted: int = 0
    """Preempted requests; they count as running too. While there are any, no block is available."""
    preemptions: int = 0
    """Preemptions since the engine started."""
    decoding: int = 0
    """Running requests that are past their prompt."""
    drafted: int = 0
    """Draft tokens verified since the engine started."""
    accepted: int = 0
    kv: KvUse | None = None
    """Use of KV tiers; None when unchanged since the last report."""


class Audited(NamedTuple):
    """Result of a full check.

    `fault` is empty when all records agree.
    """

    audit_id: int
    fault: str
    held_blocks: int
    reserved_blocks: int
    quarantined_blocks: int
    sequences: int
    loans: int


class CacheInspected(NamedTuple):
    """Contents of the block pool, in blocks."""

    query_id: int
    num_blocks: int
    held: int
    filled: int
    max_pinned: int
    pins: tuple[tuple[str, int, float], ...]
    """Tenant, blocks, and seconds until the last of these ends."""
    dropped: int
    """Blocks whose pins were dropped."""
    dropped_in_pool: int = 0
    dropped_in_tiers: int = 0
    """Blocks dropped that only tiers held."""
    in_use: int = 0
    """Blocks named by the query that stay, because requests, loans or pins hold them."""
    is_whole: bool = True
    """Whether no block is left to be dropped."""
    removed_objects: int = 0
    """Objects removed from the shared store."""
    refused: str = ""
    """Why objects of the shared store cannot be removed; nothing was dropped then."""
    store_failure: str = ""
    """Why not all objects were removed."""


class WeightsOffered(NamedTuple):
    """Weight files that a borrower may read until it returns them, or why not."""

    borrower: int
    files: tuple[WeightFile, ...] = ()
    fingerprint: bytes = b""
    endpoint: bytes = b""
    refused: str = ""


FromEngine = (
    Ready
    | StartFailed
    | Token
    | PromptScored
    | Embedded
    | Filled
    | Rejected
    | Failed
    | OpenLoan
    | ReleaseLoan
    | CloseLoan
    | LendStarting
    | LendReady
    | LendRefused
    | CacheChanged
    | Load
    | Audited
    | CacheInspected
    | WeightsOffered
)
