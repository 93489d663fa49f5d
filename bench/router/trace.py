"""The first requests of the conversation trace, faster and smaller: the same arrivals and prefixes for every system."""

import json
import os
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TRACES = Path(os.environ.get("TANDEM_TRACES", "../shared/traces"))
"""Mooncake's `conversation_trace.jsonl` is expected there; no copy of it is kept here."""
TICK_S = 3.0
"""The trace's times are multiples of about this; within it arrivals are spread at random."""
TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    num_tokens: int
    blocks: tuple[int, ...]
    """An id for each block of the prompt, the last, partial one included. Equal ids, equal prefix so far."""


def read_arrivals(count: int, speed: float, block_tokens: int) -> list[Arrival]:
    """Raises FileNotFoundError. Lengths are scaled so that a block of the trace has `block_tokens`."""
    seeds, arrivals = random.Random(1), []
    with (TRACES / "conversation_trace.jsonl").open() as file:
        for line, _ in zip(file, range(count), strict=False):
            row = json.loads(line)
            at_s = (row["timestamp"] / 1e3 + seeds.uniform(0, TICK_S)) / speed
            num_tokens = max(1, row["input_length"] * block_tokens // TRACE_BLOCK_TOKENS)
            blocks = tuple(row["hash_ids"][: -(-num_tokens // block_tokens)])
            arrivals.append(Arrival(at_s, num_tokens, blocks))
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


@cache
def block_token_ids(block: int, block_tokens: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(random.Random(block).choices(range(vocab_size), k=block_tokens))


def token_ids(arrival: Arrival, block_tokens: int, vocab_size: int) -> list[int]:
    ids = [token for block in arrival.blocks for token in block_token_ids(block, block_tokens, vocab_size)]
    return ids[: arrival.num_tokens]


CHARS_PER_TOKEN = 4


def text(arrival: Arrival, block_tokens: int) -> str:
    """For routers that know text only: CHARS_PER_TOKEN characters for each token."""
    width = block_tokens * CHARS_PER_TOKEN
    whole = "".join(f"{block:08d}" * (width // 8) for block in arrival.blocks)
    return whole[: arrival.num_tokens * CHARS_PER_TOKEN]
