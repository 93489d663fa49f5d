"""The words the engine is written in: sampling parameters, sequences, chunks."""

from dataclasses import dataclass, field
from enum import Enum

from engine.keys import BlockKey


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of the model itself, before temperature, top-k and top-p."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(slots=True, eq=False)
class Sequence:
    """A token chain whose KV is being computed here.

        token_ids   [0 ........ num_prompt ........ num_tokens)
        KV          [0 .. num_computed)                          in `blocks`
        named       [0 .. num_published blocks)                  in `keys`

    `num_prompt` counts tokens that were given: the prompt, and what an earlier attempt emitted. A sequence
    without `sampling` computes the KV of a loan and samples nothing.
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
        return len(self.token_ids) - self.num_computed

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt + self.num_emitted_before

    @property
    def decoding(self) -> bool:
        """The prompt is done: each step computes one token and samples the next."""
        return self.sampling is not None and self.num_computed >= self.num_prompt


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute tokens [start, start + count) of a sequence in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """The chunk reaches the sequence's end, so that its next token is sampled."""
        return self.sequence.sampling is not None and self.start + self.count == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token sampled for a chunk's sequence."""

    token_id: int
    logprobs: TokenLogprobs | None = None
