"""Demand of a request on its workers.

One candidate for a request, with its predicted cost, term by term.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvcache.block_keys import BlockKey
from router.placement.learning.output_lengths import SHARE, OutputKey
from router.placement.rates import NO_SESSION, SessionKey


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of one request."""

    num_tokens: int
    """Prompt tokens, with the tokens an earlier attempt emitted."""
    num_usable_blocks: int
    """Full blocks before the last prompt token, which may come from elsewhere."""
    num_total_blocks: int
    """Blocks at the request's end, when every choice has all its max_tokens."""
    block_tokens: int
    block_bytes: int
    chain_tokens: tuple[int, ...] = ()
    """Tokens of each choice to be computed: prompt and emitted tokens."""
    max_chain_tokens: int = 0
    """Largest number of tokens of a choice: prompt and max_tokens."""
    shared_tokens: int = 0
    """Prompt tokens whose full blocks the choices share."""
    other_keys: tuple[tuple[BlockKey, ...], ...] = ()
    """Keys of the prompt's blocks for each other version of the weights among the model's workers."""
    traffic_hash: float = 1.0
    """Traffic hash in [0, 1): below a canary's share the request is for the canary. 1: for no canary."""
    adapter: str = ""
    """Fingerprint of the LoRA adapter, in hexadecimal digits; empty for none."""
    files: str = ""
    """Fingerprint of config and tokenizer by which the prompt was read, in hexadecimal digits; empty: any worker's."""
    revision: str = ""
    """Revision of the model whose output was begun, in hexadecimal digits; empty: none was."""
    has_items: bool = False
    """Whether the prompt has pictures, sounds or videos, which not every worker reads."""
    own_items: tuple[tuple[int, int], ...] = ()
    """First token of each that the model's workers encode themselves, and the token after its last one."""
    embeds: bool = False
    """Whether an embedding is wanted, which prefill workers compute, and decode workers where there are no others."""
    only: tuple[str, ...] = ()
    """Workers on one of which the request must start; empty: any."""
    expected_output_tokens: int = 0
    """Output tokens that each choice is expected to have yet; 0: unknown."""
    output_key: OutputKey = ("", "")
    """Key by which the lengths of outputs are learned."""
    session: SessionKey = NO_SESSION
    """Key of the request's session, for the affinity hint."""
    num_outputs_seen: int = 0
    """Outputs of the tenant and task from which that was learned."""

    def reserved_output_tokens(self, reserve_output_tokens: int) -> int:
        """Return the output tokens that a worker with this setting reserves blocks for; 0: all."""
        expected = self.expected_output_tokens
        return min(expected, reserve_output_tokens) if expected and reserve_output_tokens else reserve_output_tokens

    def reservation(self, reserve_output_tokens: int) -> str:
        """Return the origin of the output tokens that a worker with this setting reserves blocks for, for display."""
        learned = f"{100 * SHARE:.0f}th percentile of {self.num_outputs_seen} outputs of this tenant and task"
        if not self.expected_output_tokens:
            return "the worker's reserve_output_tokens, because the length of the output is unknown"
        if self.reserved_output_tokens(reserve_output_tokens) < self.expected_output_tokens:
            return f"the worker's reserve_output_tokens; {learned}: {self.expected_output_tokens}"
        return learned

    def num_blocks_to_reserve(self, reserve_output_tokens: int) -> int:
        """Return the blocks that a worker with this setting must have free; 0 reserves everything."""
        reserve_output_tokens = self.reserved_output_tokens(reserve_output_tokens)
        if not reserve_output_tokens or not self.chain_tokens:
            return self.num_total_blocks
        if len(self.chain_tokens) == 1:  # the common case
            return -(-min(self.max_chain_tokens, self.chain_tokens[0] + reserve_output_tokens) // self.block_tokens)
        ends = [min(self.max_chain_tokens, tokens + reserve_output_tokens) for tokens in self.chain_tokens]
        return num_blocks_of(ends, self.shared_tokens, self.block_tokens)


def traffic_hash_of(request_id: str) -> float:
    """Return the traffic hash, equal for each attempt of a request at any router."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=6).digest()) / 2**48


def num_blocks_of(ends: Sequence[int], shared_tokens: int, block_tokens: int) -> int:
    """Return the blocks of sequences with these lengths that share the full blocks of the first `shared_tokens`."""
    shared = shared_tokens // block_tokens
    return shared + sum(-(-end // block_tokens) - shared for end in ends)


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
