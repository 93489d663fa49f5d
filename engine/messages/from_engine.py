"""Messages from an engine to its front."""

from collections.abc import Iterator
from typing import NamedTuple

from engine.core_types import FinishReason, GpuDevice, Pooler, RequestFailure, TokenLogprobs
from kvcache.items import Item
from kvcache.pool import CacheEvent
from loans.account import KvAccount


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
    revision: bytes
    """Fingerprint of the weights and of what changes them, as ModelInfo has it."""
    adapters: tuple[tuple[str, bytes], ...] = ()
    """Names and fingerprints of the loaded LoRA adapters."""
    store: str = ""
    """Identity of the shared store; empty without one."""
    gpu: GpuDevice | None = None
    """GPU that the engine computes on; None on a CPU."""
    warm_up_s: float = 0.0
    """Seconds that the warm-up took."""
    resumes_at_boundaries: bool = False
    """Whether a request can go on only after some of the blocks held, which the cache events name."""
    reads_media: bool = False
    """Whether it serves requests with items."""
    pooler: Pooler | None = None
    """Pooler of an engine that answers with vectors only; None: it generates."""
    loan_address: str = ""
    """Address at which it takes loans of other engines."""


class NodeLinked(NamedTuple):
    """The engine process of a node above 0 is linked with node 0, and starts its ranks."""


class StartFailed(NamedTuple):
    """The engine cannot start; its last message."""

    reason: str


class ItemsWanted(NamedTuple):
    """A request or a loan needs the blobs or embeddings of items; the answer is ItemsFetched."""

    request_id: str
    choice: int
    items: tuple[Item, ...]
    encoder_fingerprint: bytes = b""
    """Fingerprint of the model, for encode workers; empty: the engine takes blobs only."""


class Token(NamedTuple):
    """A token with all that is told of it; engines send it within `StepTokens`."""

    request_id: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    account: KvAccount | None = None
    """Account of the request; set with its first token, and with the first token after a preemption."""
    finish: FinishReason | None = None
    """Reason of the end; set with the last token of the choice."""
    choice: int = 0
    drafted: int = 0
    """Number of draft tokens that the step verified; set with the first token of a step."""
    followed_draft: bool = False
    """Whether the token was sampled in the same step as the one before it, because that one was a correct draft."""


class StepTokens(NamedTuple):
    """Tokens of one step, as columns: most tokens have nothing but an id, and objects take time to make and to send."""

    request_ids: list[str]
    token_ids: list[int]
    choices: dict[int, int]
    """Choices above 0, by the token's place in the columns."""
    details: dict[int, Token]
    """Tokens of which more is told than id and choice, by place; the columns have their ids too."""

    @classmethod
    def none(cls) -> "StepTokens":
        """Return empty columns."""
        return cls([], [], {}, {})

    def add(self, token: Token) -> None:
        """Add a token of which more is told."""
        self.details[len(self.token_ids)] = token
        self.request_ids.append(token.request_id)
        self.token_ids.append(token.token_id)

    def add_plain(self, request_id: str, token_id: int, choice: int) -> None:
        """Add a token of which nothing more is told."""
        if choice:
            self.choices[len(self.token_ids)] = choice
        self.request_ids.append(request_id)
        self.token_ids.append(token_id)

    def each(self) -> Iterator[Token]:
        """Yield the tokens in order."""
        for place, (request_id, token_id) in enumerate(zip(self.request_ids, self.token_ids, strict=True)):
            detailed = self.details.get(place)
            yield detailed or Token(request_id, token_id, choice=self.choices.get(place, 0))


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


class CacheChanged(NamedTuple):
    """Changes of the prefix cache.

    `sequence` numbers the first event. A snapshot replaces all earlier changes.
    """

    sequence: int
    events: tuple[CacheEvent, ...]
    snapshot: bool = False


class TierUse(NamedTuple):
    """Use of one KV tier, in blocks; see `kvcache/cached_blocks.py`."""

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
    pins_gave_way: int = 0
    """Pinned blocks that gave way to requests."""
    store: tuple[tuple[str, int], ...] = ()
    """Blocks of the shared store, by what became of them: see `StoreCounts` of `kvcache/store/block_store.py`."""


class LoadReport(NamedTuple):
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


class Connected(NamedTuple):
    """Result of ConnectPeers."""

    query_id: int
    failures: tuple[str, ...] = ()
    """Workers to which there is no connection, each with the reason."""


class GroupDrains(NamedTuple):
    """The data-parallel group drains, because one of its workers does."""

    rank: int
    """Data-parallel rank whose worker's message led to this one."""
    is_over: bool
    """Whether all workers of the group are empty, so that any may end."""


FromEngine = (
    Ready
    | NodeLinked
    | StartFailed
    | StepTokens
    | PromptScored
    | Embedded
    | Filled
    | Rejected
    | Failed
    | ItemsWanted
    | CacheChanged
    | LoadReport
    | Audited
    | CacheInspected
    | Connected
    | GroupDrains
)
