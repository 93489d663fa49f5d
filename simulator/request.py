"""A request as a trace has it, and what became of it."""

from dataclasses import dataclass
from enum import Enum

from protos import inference_pb2 as pb

MAX_HASH_ID = 1 << 30
"""Hash ids of traces are below: above are the tokens of prompts that share nothing, and of outputs."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. Equal `hash_ids` up to some place mean equal prompts up to there."""

    number: int
    arrival_s: float
    """Since the trace's beginning."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """One for each `hash_tokens` of the prompt, the last perhaps of a part; none: it shares nothing with others."""
    hash_tokens: int = 512
    tenant: str = ""
    priority: int = 0

    def tokens(self) -> list[int]:
        """A prompt of that length, which shares with others what the trace says."""
        tokens: list[int] = []
        for hash_id in self.hash_ids:
            tokens += [hash_id] * self.hash_tokens
        del tokens[self.input_tokens :]
        tokens += [MAX_HASH_ID + self.number % MAX_HASH_ID] * (self.input_tokens - len(tokens))
        return tokens


class EndState(Enum):
    """How a request ended."""

    FINISHED = "finished"
    REFUSED = "refused"
    """By admission, or because no pool could hold it."""
    FAILED = "failed"
    """Placed as often as it may be, and each time its worker died."""


@dataclass(slots=True)
class Outcome:
    """What became of a request; times are the client's, seconds since the simulation began."""

    request: TraceRequest
    sent_at: float
    end_state: EndState | None = None
    """None: it is under way."""
    reason: str = ""
    """Of a refusal or a failure."""
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_emitted: int = 0
    num_attempts: int = 0
    reused_tokens: int = 0
    """Of the prompt: not computed anywhere for this request, but held by its decode worker, or by who lent."""
    moved_bytes: int = 0
    predicted_ttft_s: float = 0.0
    receipt: pb.Receipt | None = None
    """Of a request that finished."""

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.sent_at

    @property
    def e2e_s(self) -> float:
        return self.last_token_at - self.sent_at

    @property
    def itl_s(self) -> float:
        """Mean time between two of its tokens; 0 of a single one."""
        return (self.last_token_at - self.first_token_at) / max(1, self.num_emitted - 1)
