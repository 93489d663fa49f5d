"""What the front process and its engine process say to each other. Plain data, batched per step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.core_types import FinishReason, RequestFailure, SamplingParams, TokenLogprobs
from engine.core.scheduler import StepBudget
from engine.kv.block_pool import CacheEvent

# ----------------------------------------------------------------------------------------- to the engine


@dataclass(frozen=True, slots=True)
class PlacementMark:
    """Which placement of which router caused this work; echoed in load reports."""

    router_id: str = ""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Generate:
    """Serve a request: admit it at once or answer Rejected. With `borrow`, ask for a loan of what is missing."""

    request_id: str
    prompt: Sequence[int]
    emitted: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    priority: int
    borrow: bool
    mark: PlacementMark = PlacementMark()
    lender_computes: bool = True
    """What it lacks; else it lends what it holds."""
    emitted_others: tuple[tuple[int, ...], ...] = ()
    """As `emitted`, of choices 1, 2 and so on; of those left out nothing was."""
    finished: frozenset[int] = frozenset()
    """Choices that an earlier attempt finished."""
    num_scored: int = 0
    """Prompt tokens whose log probabilities an earlier attempt gave out."""

    def emitted_of(self, choice: int) -> tuple[int, ...]:
        """What an earlier attempt emitted of it."""
        if choice == 0:
            return self.emitted
        return self.emitted_others[choice - 1] if choice <= len(self.emitted_others) else ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """The request, or one choice of it, is over; free what it has. No answer."""

    request_id: str
    choice: int | None = None
    """None: all of them."""


@dataclass(frozen=True, slots=True)
class LoanStarted:
    request_id: str
    endpoint: bytes
    end_block: int
    cached_end_block: int
    queued_ms: float


@dataclass(frozen=True, slots=True)
class LoanBlocks:
    request_id: str
    first: int
    block_ids: tuple[int, ...]
    fingerprints: bytes
    fetched: bool = False


@dataclass(frozen=True, slots=True)
class LoanFailed:
    """The loan's stream ended before the borrower closed it."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Lend:
    """Somebody wants blocks [first_block, len(token_ids) / block_tokens)."""

    loan_id: str
    token_ids: Sequence[int]
    first_block: int
    cache_salt: str
    may_compute: bool
    priority: int
    mark: PlacementMark = PlacementMark()
    borrow: bool = False
    """Somebody is named who holds more of it: ask for a loan of what is missing before computing it."""
    fast_path: bytes = b""
    """Where the borrower's engine may be told early, see `engine/lending/fast_path.py`."""


@dataclass(frozen=True, slots=True)
class LendReleased:
    loan_id: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class LendClosed:
    loan_id: str


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Send the whole prefix cache as one CacheChanged."""


@dataclass(frozen=True, slots=True)
class SetBudget:
    """Compute so much in a step from now on: the worker's role has changed."""

    budget: StepBudget


@dataclass(frozen=True, slots=True)
class Audit:
    """Check every book against every holder and answer Audited."""

    audit_id: int


ToEngine = (
    Generate
    | Cancel
    | LoanStarted
    | LoanBlocks
    | LoanFailed
    | Lend
    | LendReleased
    | LendClosed
    | TakeSnapshot
    | SetBudget
    | Audit
)

# --------------------------------------------------------------------------------------- from the engine


@dataclass(frozen=True, slots=True)
class Ready:
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


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The engine cannot start; the last thing it says."""

    reason: str


@dataclass(slots=True)
class KvAccount:
    """Where the KV of one request came from, and when (seconds of the host's monotonic clock)."""

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
    """Brought back from this engine's own tiers."""
    transport: str = ""
    lanes: tuple[str, ...] = ()
    loan_failure: str = ""
    restore_failure: str = ""
    """Why bringing back from the tiers ended early."""
    preemptions: int = 0
    """How often its blocks were taken back, so that all its tokens had to be computed anew."""
    recomputed_tokens: int = 0
    """Of those tokens, the ones that had been computed and were no longer cached; `computed_tokens` leaves them out."""
    times: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Token:
    request_id: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    account: KvAccount | None = None
    """With the first token of a request, and with the first one after it was preempted."""
    finish: FinishReason | None = None
    """With the last one of the choice."""
    choice: int = 0
    cumulative_logprob: float | None = None
    """Of a beam, with the last one."""
    drafted: int = 0
    """With the first token of a step: guesses at those after it that the step verified."""
    followed_draft: bool = False
    """It was sampled in the same step as the token before it, since that one was guessed right."""


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log probabilities of the next prompt tokens, in order, when they were asked for."""

    request_id: str
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request is over without a (further) token.

    `permanent`: it could never fit here. Otherwise it does not now, or lost blocks to a silent peer.
    """

    request_id: str
    reason: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The request is over without a further token: it was at fault itself, and would be anywhere."""

    request_id: str
    failure: RequestFailure


@dataclass(frozen=True, slots=True)
class OpenLoan:
    """Ask for chain blocks [first_block, end_block): the lender of a request, or the source of a loan given."""

    request_id: str
    first_block: int
    end_block: int
    may_compute: bool
    fast_path: bytes = b""
    """As of Lend."""


@dataclass(frozen=True, slots=True)
class ReleaseLoan:
    request_id: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class CloseLoan:
    request_id: str


@dataclass(frozen=True, slots=True)
class LendStarting:
    loan_id: str
    end_block: int
    cached_end_block: int
    queued_ms: float


@dataclass(frozen=True, slots=True)
class LendReady:
    loan_id: str
    first: int
    block_ids: tuple[int, ...]
    fingerprints: bytes
    fetched: bool = False
    """Not computed here but borrowed, or brought back from a tier."""


@dataclass(frozen=True, slots=True)
class LendRefused:
    """The loan is over. `bad_request`: the borrower broke the protocol; otherwise there is no room."""

    loan_id: str
    reason: str
    bad_request: bool


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """`sequence` is that of the first event. A snapshot replaces all that was said before it."""

    sequence: int
    events: tuple[CacheEvent, ...]
    snapshot: bool = False


class TierUse(NamedTuple):
    """One tier of KV, in blocks; see `engine/kv/kv_stats.py`."""

    tier: str
    blocks: int
    """That it has room for; 0 of what other workers have."""
    used: int
    """That hold something, in use or kept."""
    queries: int
    hits: int


class KvUse(NamedTuple):
    """Where KV is and where it was found; counters are since the engine started."""

    tiers: tuple[TierUse, ...]
    read_bytes: int
    """From other workers, verified."""
    read_s: float
    """Time in which reads from other workers were under way."""
    mismatched: int


@dataclass(frozen=True, slots=True)
class Load:
    """Sent by the step loop a few times a second, so that its absence means a hung engine."""

    step: int
    running: int
    loans: int
    queued_loans: int
    queued_prefill_tokens: int
    available_blocks: int
    num_blocks: int
    placements_seen: dict[str, int]
    preempted: int = 0
    """Requests that wait to be computed anew; they count as running too. While there are any, nothing is available."""
    preemptions: int = 0
    """Since the engine started."""
    decoding: int = 0
    """Of the running ones: those past their prompt."""
    drafted: int = 0
    """Tokens that were guessed and verified, since the engine started."""
    accepted: int = 0
    kv: KvUse | None = None
    """None: as in the report before."""


@dataclass(frozen=True, slots=True)
class Audited:
    """The books after a full check. `fault` is empty when they balance."""

    audit_id: int
    fault: str
    held_blocks: int
    reserved_blocks: int
    quarantined_blocks: int
    sequences: int
    loans: int


FromEngine = (
    Ready
    | StartFailed
    | Token
    | PromptScored
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
)
