"""A request of a trace, and its outcome."""

from dataclasses import dataclass
from enum import Enum

from protos import inference_pb2 as pb

MAX_HASH_ID = 1 << 30
"""Bound of traces' hash ids; tokens of unshared prompts and of outputs are above."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace.

    Equal leading `hash_ids` mean equal prompts up to there.
    """

    number: int
    arrival_s: float
    """Seconds since the trace's beginning."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """One id per `hash_tokens` of the prompt, the last perhaps partial; empty: nothing is shared."""
    hash_tokens: int = 512
    tenant: str = ""
    priority: int = 0
    session_id: str = ""
    """Name of the conversation, for the affinity hint; empty: none."""

    def tokens(self) -> list[int]:
        """Return a prompt of that length, with the sharing that the trace describes."""
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
    """Refused by admission, or because no pool could hold it."""
    FAILED = "failed"
    """Placed as often as allowed, and each time its worker died."""


@dataclass(slots=True)
class Outcome:
    """Outcome of a request; times are the client's, in seconds since the simulation began."""

    request: TraceRequest
    sent_at: float
    end_state: EndState | None = None
    """End; None: still running."""
    reason: str = ""
    """Reason of a refusal or a failure."""
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_emitted: int = 0
    num_attempts: int = 0
    reused_tokens: int = 0
    """Prompt tokens that were not computed for this request, because its decode worker or lender held them."""
    moved_bytes: int = 0
    predicted_ttft_s: float = 0.0
    receipt: pb.Receipt | None = None
    """Receipt of a finished request."""

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.sent_at

    @property
    def e2e_s(self) -> float:
        return self.last_token_at - self.sent_at

    @property
    def itl_s(self) -> float:
        """Mean seconds between two tokens; 0 for a single one."""
        return (self.last_token_at - self.first_token_at) / max(1, self.num_emitted - 1)
