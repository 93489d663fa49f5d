"""Requests of the load comparison: the same prompts, lengths and arrivals for every system, as rows for aiperf."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from bench.models import SMALL_LLAMA
from bench.support.traces import CONVERSATION, TICK_S
from simulator.traces.reading import Trace, Window

BLOCK_TOKENS = 32
MAX_PROMPT = 1024
FIRST_WORD = 2
"""First token that is no special one."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt as words, one token each, and its number of output tokens."""

    prompt: str
    output_tokens: int


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


def _words(seed: int, count: int) -> list[str]:
    tokens = random.Random(seed).choices(range(FIRST_WORD, SMALL_LLAMA["vocab_size"]), k=count)
    return [f"w{token}" for token in tokens]


@cache
def _block(number: int) -> str:
    return " ".join(_words(number, BLOCK_TOKENS))


def conversation(count: int, seed: int) -> Iterator[Ask]:
    """Yield the first requests of the conversation trace, a sixteenth as long: equal blocks mean an equal prefix."""
    outputs = random.Random(seed)
    for arrival in read_arrivals(count, 1.0, BLOCK_TOKENS):
        num_tokens = min(arrival.num_tokens, MAX_PROMPT)
        words = " ".join(_block(block + 1_000_000 * seed) for block in arrival.blocks).split()[:num_tokens]
        yield Ask(" ".join(words), outputs.randint(8, 40))


def short_chat(count: int, seed: int) -> Iterator[Ask]:
    """Yield prompts of about 100 tokens that share nothing, with about 48 output tokens."""
    lengths = random.Random(seed)
    for number in range(count):
        yield Ask(" ".join(_words(10_000_000 * (seed + 1) + number, lengths.randint(50, 150))), lengths.randint(32, 64))


def long_prompt(count: int, seed: int) -> Iterator[Ask]:
    """Yield prompts of about 900 tokens that share nothing, with about 16 output tokens."""
    lengths = random.Random(seed)
    for number in range(count):
        yield Ask(
            " ".join(_words(20_000_000 * (seed + 1) + number, lengths.randint(776, 1024))), lengths.randint(8, 24)
        )


PROFILES: dict[str, Callable[[int, int], Iterator[Ask]]] = {
    "conversation": conversation,
    "short-chat": short_chat,
    "long-prompt": long_prompt,
}


def write_rows(path: Path, asks: Sequence[Ask], rate: float, seed: int) -> None:
    """Write rows with arrivals at random, `rate` a second."""
    gaps = random.Random(seed)
    moments = accumulate(gaps.expovariate(rate) for _ in asks)
    with path.open("w") as file:
        for ask, moment in zip(asks, moments, strict=True):
            row = {"text_input": ask.prompt, "output_length": ask.output_tokens, "timestamp": round(1e3 * moment)}
            file.write(json.dumps(row) + "\n")
