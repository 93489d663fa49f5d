"""Conversations of a real trace, made small: a block of 512 tokens becomes one of 32 words."""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.compare.http_wire import HttpClient
from bench.fleet.servers import BLOCK, CONTEXT, TINY

SCALE = 512 // BLOCK
MAX_OUTPUT = 256
MAX_PROMPT = CONTEXT - MAX_OUTPUT - 1
SHORTEST = 2000
"""First of the words that are one token each: `w1` is a special token, so `w1234` would be two."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Request that arrives `at` seconds after the beginning."""

    at: float
    prompt: str
    num_output: int

    def bytes(self) -> bytes:
        return HttpClient.request(self.prompt, self.num_output)


def words(block: int) -> list[str]:
    """Return the words of a block of the trace."""
    draw = random.Random(block)
    return [f"w{draw.randrange(SHORTEST, TINY['vocab_size'])}" for _ in range(BLOCK)]


def conversations(trace: Path, rate: float, seconds: float, part: int) -> Sequence[Arrival]:
    """Return the requests of one part of a trace, as long as `seconds` at this mean rate."""
    count = int(rate * seconds)
    with trace.open() as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, part * count, (part + 1) * count)]
    first, last = rows[0]["timestamp"], rows[-1]["timestamp"]
    arrivals = []
    for row in rows:
        prompt = [word for block in row["hash_ids"] for word in words(block)]
        num_tokens = min(MAX_PROMPT, max(BLOCK, row["input_length"] // SCALE))
        at = seconds * (row["timestamp"] - first) / max(1, last - first)
        arrivals.append(
            Arrival(at, " ".join(prompt[:num_tokens]), min(MAX_OUTPUT, max(2, row["output_length"] // SCALE)))
        )
    return arrivals
