"""The words the engine is written in: sampling parameters, sequences, chunks."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from engine.kv.block_keys import BlockKey


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


MAX_CHAINS = 64
"""Choices or beams of one request, at most."""

StructureKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form an output must have; `protos/inference.proto` documents the kinds."""

    kind: StructureKind
    texts: tuple[str, ...]
    """The choices of `choice`, nothing of `json_object`, one text of the others."""

    @property
    def field(self) -> str:
        """What an error about it names."""
        return f"sampling.structured.{self.kind}"


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search; `protos/inference.proto` documents the fields."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Every field resolved and in range; `protos/inference.proto` documents them."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    min_tokens: int = 0
    structured: StructuredOutput | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    beam: BeamParams | None = None

    @property
    def num_chains(self) -> int:
        """Chains that are computed at once: choices, or beams."""
        return self.n if self.beam is None else self.beam.width


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of the model itself, before temperature, top-k and top-p."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A token chain whose KV is being computed here.

        token_ids   [0 ........ num_prompt ........ num_tokens)
        KV          [0 .. num_computed)                          in `blocks`
        named       [0 .. num_published blocks)                  in `keys`

    `num_prompt` counts tokens that were given: the prompt, and what an earlier attempt emitted. A sequence
    without `sampling` computes the KV of a loan and samples nothing. A preempted one has lost its KV: all its
    tokens, those it sampled among them, are computed again in chunks as a prompt is, and the next one is sampled at
    their end.
    """

    request_id: str
    token_ids: list[int]
    num_prompt: int
    root: BlockKey
    sampling: SamplingParams | None
    priority: int
    arrival: int
    blocks: list[int] = field(default_factory=list)
    num_reserved: int = 0
    num_computed: int = 0
    keys: list[BlockKey] = field(default_factory=list)
    num_emitted_before: int = 0
    """Tokens among `num_prompt` that count against max_tokens: an earlier attempt sampled them."""
    turn: int = 0
    """Its place among those that wait for their next token: lower waits longer. See `engine/core/scheduler.py`."""
    num_preemptions: int = 0
    num_recomputed: int = 0
    """Tokens whose KV was here, was given back by preemption, and had to be computed again."""
    choice: int = 0
    """Which of its request's choices it is. What it draws depends on it."""
    siblings: list["Sequence"] = field(default_factory=list)
    """Those that will be forked from it: they wait, with no KV, until it has computed what they share."""
    fork_at: int = 0
    """How many leading tokens they share. It computes no more than those while it has `siblings`."""
    heard: bool = False
    """A beam of which is known what may come next, while its search waits for the others."""
    num_scored: int = 0
    """Prompt tokens after the first whose log probabilities were given out, when they are asked for."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Sampled so far, by this attempt and earlier ones."""
        return self.token_ids[self.num_prompt - self.num_emitted_before :]

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is not computed yet."""
        end = self.fork_at if self.siblings else len(self.token_ids)
        return max(0, end - self.num_computed)

    @property
    def num_to_score(self) -> int:
        """Prompt tokens whose log probabilities are to be given out: all but the first."""
        if self.sampling is None or self.sampling.prompt_logprobs is None:
            return 0
        return self.num_prompt - self.num_emitted_before - 1

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose KV may come from elsewhere: not those whose logits are needed here."""
        return self.num_scored if self.num_scored < self.num_to_score else len(self.token_ids) - 1

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt + self.num_emitted_before

    @property
    def max_num_tokens(self) -> int:
        """Tokens it has when it has sampled all it may."""
        new = self.sampling.max_tokens - self.num_emitted_before if self.sampling is not None else 0
        return self.num_prompt + new

    @property
    def decoding(self) -> bool:
        """Only the token sampled last is left to compute: each step computes one and samples the next."""
        if self.sampling is None or self.siblings:
            return False
        num_tokens = len(self.token_ids)
        return num_tokens > self.num_prompt and num_tokens - self.num_computed == 1


@dataclass(frozen=True, slots=True)
class SamplePosition:
    """Where a token may come next: after the tokens of a sequence and some guesses at those that follow.

    A sequence itself is such a place, with no guess; what both have in common is all that sampling asks of one."""

    sequence: Sequence
    draft_tokens: tuple[int, ...]

    @property
    def sampling(self) -> SamplingParams | None:
        return self.sequence.sampling

    @property
    def choice(self) -> int:
        return self.sequence.choice

    @property
    def token_ids(self) -> list[int]:
        return [*self.sequence.token_ids, *self.draft_tokens]

    @property
    def num_tokens(self) -> int:
        return self.sequence.num_tokens + len(self.draft_tokens)

    @property
    def output_token_ids(self) -> list[int]:
        return [*self.sequence.output_token_ids, *self.draft_tokens]

    @property
    def num_sampled(self) -> int:
        return self.sequence.num_sampled + len(self.draft_tokens)


AnyPlace = Sequence | SamplePosition


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute tokens [start, start + count) of a sequence in this step, and after them guesses at what follows."""

    sequence: Sequence
    start: int
    count: int
    draft_tokens: tuple[int, ...] = ()
    """Only of a chunk that samples. Each is verified: the token sampled in its place is the same, or it was wrong, and
    its KV is written over."""
    num_drafts: int = 0
    """So many guesses are the runner's to make, with its draft model; `draft_tokens` is empty then."""

    @property
    def num_draft_tokens(self) -> int:
        """Made, or to be made."""
        return len(self.draft_tokens) or self.num_drafts

    @property
    def num_rows(self) -> int:
        """Tokens that the model is given."""
        return self.count + len(self.draft_tokens)

    @property
    def end(self) -> int:
        """One past the last position that is computed, those of guesses included."""
        return self.start + self.count + self.num_draft_tokens

    @property
    def token_ids(self) -> list[int]:
        """What the model is given, [num_rows]."""
        tokens = self.sequence.token_ids[self.start : self.start + self.count]
        return [*tokens, *self.draft_tokens] if self.draft_tokens else tokens

    @property
    def places(self) -> list[AnyPlace]:
        """Where tokens are sampled, of a chunk that samples: its end, and after each guess."""
        return [
            self.sequence,
            *(SamplePosition(self.sequence, self.draft_tokens[: j + 1]) for j in range(len(self.draft_tokens))),
        ]

    @property
    def samples(self) -> bool:
        """The chunk reaches the sequence's end, so that its next token is sampled."""
        return self.sequence.sampling is not None and self.start + self.count == len(self.sequence.token_ids)

    @property
    def scored(self) -> range:
        """Positions of the chunk whose logits give the log probability of the prompt token that follows."""
        sequence = self.sequence
        if not (num_to_score := sequence.num_to_score):  # as of most
            return range(0)
        return range(max(self.start, sequence.num_scored), min(self.start + self.count, num_to_score))

    @property
    def answers(self) -> bool:
        """The runner has something to say of it."""
        return self.samples or len(self.scored) > 0


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Why a request cannot go on: `field` of it is at fault."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What a chunk's logits gave: one token sampled for its sequence, or why there can be none."""

    token_id: int
    """-1 when the chunk samples none."""
    logprobs: TokenLogprobs | None = None
    failure: RequestFailure | None = None
    """The request ends with it, and `token_id` means nothing."""
    prompt: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens that follow `Chunk.scored`."""
    num_draft_tokens: int = 0
    """That were verified."""
    following: "tuple[SampleResult, ...]" = ()
    """What was sampled after it, in turn: as many as guesses were right."""


def verified(draft_tokens: tuple[int, ...], answers: Iterable[SampleResult | None]) -> SampleResult:
    """The answer to a chunk with these guesses. `answers` are what is sampled after none of them, after the first, and
    so on; None where nothing can be said if it comes to that, and then the next step will. No more of them are asked
    for than guesses were right."""
    of_places = iter(answers)
    first = next(of_places)
    assert first is not None
    last, following = first, list[SampleResult]()
    for draft_token in draft_tokens:
        if last.failure is not None or last.token_id != draft_token or (answer := next(of_places)) is None:
            break
        following.append(answer)
        last = answer
    return replace(first, num_draft_tokens=len(draft_tokens), following=tuple(following)) if draft_tokens else first
