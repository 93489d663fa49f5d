"""Types shared by all parts of the engine: sampling parameters, sequences, chunks and their results."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from kvcache.chain import Chain


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


MAX_CHAINS = 64
"""Largest number of choices of one request."""

Pooling = Literal["last", "mean"]
"""Way from the hidden states of a prompt's tokens to one vector."""


@dataclass(frozen=True, slots=True)
class Pooler:
    """Way from hidden states to the vector that a client gets."""

    pooling: Pooling
    normalize: bool
    """Whether vectors are scaled to length 1."""
    dimensions: int
    classifies: bool = False
    """Whether a vector has the probability of each label instead of an embedding, and `dimensions` counts labels."""


StructureKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Required form of an output; `protos/inference.proto` documents the kinds."""

    kind: StructureKind
    texts: tuple[str, ...]
    """Alternatives of kind `choice`, empty for `json_object`, one text for the other kinds."""
    scope: str = ""
    """Cache salt within which compiled grammars are shared: the time of a compilation would tell other tenants."""

    @property
    def field(self) -> str:
        """Request field that errors about this form name."""
        return f"sampling.structured.{self.kind}"


class SamplingParams(NamedTuple):
    """Sampling parameters, resolved and in range; `protos/inference.proto` documents the fields."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    seed_is_drawn: bool = False
    """Whether the router drew the seed, because the client gave none."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, value added to its logit)."""
    min_tokens: int = 0
    structured: StructuredOutput | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    pooling: Pooling | None = None
    """Pooling of the prompt's hidden states; nothing is sampled then."""


class TokenLogprobs(NamedTuple):
    """Log probabilities of the model itself, before temperature, top-k and top-p."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(slots=True, eq=False)
class EngineSequence(Chain):
    """A token chain that an engine computes, with or without output.

    `num_prompt` counts the prompt, and the tokens that an earlier attempt emitted. A sequence without `sampling`
    computes the KV of a loan and samples nothing. A preempted sequence has lost its KV: all its tokens, sampled ones
    included, are computed again in chunks like a prompt, and the next token is sampled at their end.
    """

    sampling: SamplingParams | None = None
    num_emitted_before: int = 0
    """Tokens among `num_prompt` that count against max_tokens, because an earlier attempt sampled them."""
    num_preemptions: int = 0
    num_recomputed: int = 0
    """Tokens computed again because preemption gave their KV back."""
    choice: int = 0
    """Index of the choice within its request; random draws depend on it."""
    siblings: list["EngineSequence"] = field(default_factory=list)
    """Sequences to be forked from this one; they wait, without KV, until it has computed the shared tokens."""
    fork_at: int = 0
    """Number of leading tokens that siblings share. A sequence with `siblings` computes no more than those."""
    num_scored: int = 0
    """Leading prompt positions whose requested scores, see `num_to_score`, were already returned or are not needed."""
    num_expected: int = 0
    """Number of tokens at its expected end; 0: unknown."""

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens sampled so far, by this attempt and earlier ones."""
        return self.token_ids[self.num_prompt - self.num_emitted_before :]

    @property
    def num_remaining(self) -> int:
        """Number of tokens whose KV is not computed yet and may be computed now."""
        end = self.fork_at if self.siblings else len(self.token_ids)
        if self.held_at is not None:
            end = min(end, self.held_at)
        return max(0, end - self.num_computed)

    @property
    def num_to_score(self) -> int:
        """Number of leading prompt positions whose scores are requested.

        A score is the log probability of the next prompt token, or the hidden state where these are pooled.
        """
        if self.sampling is None:
            return 0
        if self.sampling.pooling is not None:
            return self.num_prompt
        if self.sampling.prompt_logprobs is None:
            return 0
        return self.num_prompt - self.num_emitted_before - 1

    @property
    def only_fills(self) -> bool:
        """Whether the request wants the blocks of its tokens, all full, and no output."""
        return self.sampling is not None and self.sampling.max_tokens == 0

    @property
    def num_reusable(self) -> int:
        """Number of leading tokens whose KV may come from elsewhere, because their logits are not needed here."""
        if self.only_fills:
            return len(self.token_ids)
        return self.num_scored if self.num_scored < self.num_to_score else len(self.token_ids) - 1

    @property
    def num_sampled(self) -> int:
        """Number of tokens sampled so far, earlier attempts included."""
        return len(self.token_ids) - self.num_prompt + self.num_emitted_before

    @property
    def max_num_tokens(self) -> int:
        """Number of tokens when the sequence has sampled all it may."""
        new = self.sampling.max_tokens - self.num_emitted_before if self.sampling is not None else 0
        return self.num_prompt + new

    def num_tokens_reserved(self, reserve_output_tokens: int) -> int:
        """Return the number of tokens for which it starts or restarts with blocks.

        They are so many more than it has, and reach no further than its expected end unless it has outgrown that.
        """
        end = min(self.max_num_tokens, self.num_tokens + reserve_output_tokens)
        return min(end, self.num_expected) if self.num_tokens < self.num_expected else end

    @property
    def decoding(self) -> bool:
        """Whether only the last sampled token is left to compute: each step computes one token and samples the next."""
        if self.sampling is None or self.siblings:
            return False
        num_tokens = len(self.token_ids)
        return num_tokens > self.num_prompt and num_tokens - self.num_computed == 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Work of one step for one sequence: tokens [start, start + count)."""

    sequence: EngineSequence
    start: int
    count: int

    @property
    def end(self) -> int:
        """One past the last computed position."""
        return self.start + self.count

    @property
    def token_ids(self) -> list[int]:
        """Tokens that the model computes, [count]."""
        return self.sequence.token_ids[self.start : self.end]

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's end, so that the next token is sampled."""
        sampling = self.sequence.sampling
        at_end = self.end == len(self.sequence.token_ids)
        return at_end and sampling is not None and sampling.pooling is None and sampling.max_tokens > 0

    @property
    def pools(self) -> bool:
        """Whether the hidden states of `scored` are pooled."""
        sampling = self.sequence.sampling
        return sampling is not None and sampling.pooling is not None

    @property
    def scored(self) -> range:
        """Positions of the chunk whose scores are requested, see `Sequence.num_to_score`."""
        sequence = self.sequence
        if not (num_to_score := sequence.num_to_score):  # the common case
            return range(0)
        return range(max(self.start, sequence.num_scored), min(self.end, num_to_score))

    @property
    def answers(self) -> bool:
        """Whether the runner returns a result for the chunk."""
        return self.samples or len(self.scored) > 0


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Reason why a request cannot continue: its `field` is at fault."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Result of a chunk: the sampled token, or the reason why there is none."""

    token_id: int
    """Sampled token, or -1 when the chunk samples none."""
    logprobs: TokenLogprobs | None = None
    failure: RequestFailure | None = None
    """Failure that ends the request; `token_id` is then meaningless."""
    prompt: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of the prompt tokens that follow `Chunk.scored`."""
    pooled: bytes = b""
    """Sum of the hidden states of `Chunk.scored`, float32, where these are pooled."""
    num_pooled: int = 0
    """Number of hidden states in `pooled`."""


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """GPU that an engine, or a rank of it, computes on."""

    name: str
    num_bytes: int
    """Size of its memory."""


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Limits of one step, in tokens."""

    max_tokens: int
    max_prefill_tokens: int
    """Largest number of prompt tokens; it bounds the inter-token latency of running streams."""

    @property
    def guaranteed_tokens(self) -> int:
        """Share of the sequence that has waited longest for its next token."""
        return max(1, min(self.max_tokens, self.max_prefill_tokens) // 4)
