"""First requests of the conversation trace, faster and smaller: the same arrivals and prefixes for every system."""

import random
from dataclasses import dataclass
from functools import cache

from bench.traces import CONVERSATION, TICK_S
from simulator.traces.reading import Trace, Window


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    num_tokens: int
    blocks: tuple[int, ...]
    """Id of each prompt block, the last, partial one included. Equal ids mean an equal prefix so far."""


def read_arrivals(count: int, speed: float, block_tokens: int) -> list[Arrival]:
    """Read the first arrivals, with lengths scaled so that a block of the trace has `block_tokens`.

    Raises BadTrace.
    """
    arrivals = []
    for request in Trace(CONVERSATION, Window(rate=speed, most=count, spread_s=TICK_S, seed=1)):
        num_tokens = max(1, request.input_tokens * block_tokens // request.hash_tokens)
        arrivals.append(Arrival(request.arrival_s, num_tokens, request.hash_ids[: -(-num_tokens // block_tokens)]))
    return arrivals


@cache
def block_token_ids(block: int, block_tokens: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(random.Random(block).choices(range(vocab_size), k=block_tokens))


def token_ids(arrival: Arrival, block_tokens: int, vocab_size: int) -> list[int]:
    ids = [token for block in arrival.blocks for token in block_token_ids(block, block_tokens, vocab_size)]
    return ids[: arrival.num_tokens]


CHARS_PER_TOKEN = 4


def text(arrival: Arrival, block_tokens: int) -> str:
    """Return text for routers that take only text: CHARS_PER_TOKEN characters for each token."""
    width = block_tokens * CHARS_PER_TOKEN
    whole = "".join(f"{block:08d}" * (width // 8) for block in arrival.blocks)
    return whole[: arrival.num_tokens * CHARS_PER_TOKEN]
