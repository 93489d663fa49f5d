"""One candidate for a request, with its predicted cost, term by term."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Candidate:
    """A way to start a request: its workers, and its terms in seconds."""

    decode_id: str
    lender_id: str | None
    lender_computes: bool
    source_id: str | None
    """Worker from which the lender reads blocks that it lacks."""
    num_blocks: int
    """Leading blocks of the prompt that the decode worker has after the loan, its own included."""
    hit_blocks: int
    """Blocks of the prompt that one of the three workers holds, so none computes them."""
    lender_tokens: int
    """Tokens that the lender computes."""
    own_tokens: int
    """Tokens that the decode worker computes."""
    moved_bytes: int
    """Bytes that the decode worker reads."""
    held_bytes: int
    """Bytes among those that need no computing, so they move at once."""
    source_bytes: int
    """Bytes that the lender reads from its source."""
    waiting_bytes: float
    """Bytes in flight of other placements that share a NIC with the transfer while it lasts, and delay it."""
    source_waiting_bytes: float
    """Bytes in flight that delay the lender's read from its source."""
    seconds: Mapping[str, float]
    """Seconds of each term by name; a term that does not apply is missing."""
    ttft_s: float
    delay_s: float
    """Delay of all streams that run on the decode worker, summed, and the terms of other packages."""
    affinity_s: float
    """Reduction of the cost for workers that served the session's last request."""
    cost_s: float
    reserved_output_tokens: int
    """Output tokens of each choice that the decode worker reserves blocks for."""
    reservation: str
    """Origin of that number, for display."""
    is_last_decode: bool
    """Whether its decode worker served the session's last request."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A candidate that was not chosen."""

    decode_id: str
    lender_id: str | None
    lender_computes: bool
    cost_s: float
