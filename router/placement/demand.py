"""What a request needs of its workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from engine.kv.block_keys import BlockKey


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs."""

    num_tokens: int
    """Of the prompt, with what an earlier attempt emitted."""
    num_usable_blocks: int
    """Full blocks before the last prompt token: those that may come from elsewhere."""
    num_total_blocks: int
    """At its end, when every choice has all its max_tokens."""
    block_tokens: int
    block_bytes: int
    chain_tokens: tuple[int, ...] = ()
    """Of each choice that is to be computed: prompt and what was emitted."""
    max_chain_tokens: int = 0
    """Prompt and max_tokens."""
    shared_tokens: int = 0
    """Of the prompt, those whose full blocks the choices share."""
    other_keys: tuple[tuple[BlockKey, ...], ...] = ()
    """Where the model's workers have several versions of its weights: what the prompt's blocks are called by each of
    the others."""
    traffic_hash: float = 1.0
    """In [0, 1), drawn for the request: below a canary's share of the traffic it is for the canary. 1: for none."""

    def num_promised_blocks(self, reserve_output_tokens: int) -> int:
        """What a worker that promises so much output must have to start it now; 0: all of it."""
        if not reserve_output_tokens or not self.chain_tokens:
            return self.num_total_blocks
        if len(self.chain_tokens) == 1:  # nearly always
            return -(-min(self.max_chain_tokens, self.chain_tokens[0] + reserve_output_tokens) // self.block_tokens)
        ends = [min(self.max_chain_tokens, tokens + reserve_output_tokens) for tokens in self.chain_tokens]
        return num_blocks_of(ends, self.shared_tokens, self.block_tokens)


def traffic_hash_of(request_id: str) -> float:
    """The same for each attempt of a request, at any router."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=6).digest()) / 2**48


def num_blocks_of(ends: Sequence[int], shared_tokens: int, block_tokens: int) -> int:
    """Of chains that have so many tokens each and share the full blocks of the first `shared_tokens`."""
    shared = shared_tokens // block_tokens
    return shared + sum(-(-end // block_tokens) - shared for end in ends)
