"""A request of a trace, and its outcome.

Errors in the input of the simulator.
"""

import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from cluster.errors import StartError, TandemError
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


class BadTrace(TandemError):
    """A malformed trace at `line`, counted from 1; 0: the file as a whole."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}" if line else f"{path}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


class BadSetup(StartError):
    """An invalid option, or one that does not go with the others."""


SHOWN = 60
"""Characters of a bad value that an error repeats."""


def shown(value: object) -> str:
    """Return a value as Python writes it, shortened."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**SHOWN:
        return f"a number of {value.bit_length()} bits"
    text = repr(value[: SHOWN + 1] if isinstance(value, str | bytes | list | tuple) else value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def check_above_0(field: str, value: float | None, or_0: bool = False) -> None:
    """Check for a finite number above 0, or None.

    Raises BadSetup.
    """
    if value is not None and not (0 < value < math.inf or (or_0 and value == 0)):
        raise BadSetup(field, f"{value:g} is not {'at least' if or_0 else 'above'} 0")
