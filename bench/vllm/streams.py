"""Loads of many streams, offered by processes that read one load a line and print the result.

This module runs in Tandem's environment and in vLLM's, so it imports nothing of either. vLLM alone is one such process
(`plain.py`); in front of Tandem are several (`client.py`), so that the client's own CPU time limits no figure.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, TextIO

SAMPLINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "seeded top-p": {"temperature": 0.8, "top_p": 0.9},
}
"""Sampling options by name; a seeded one also has a seed for each stream."""
FIRST_TOKENS = 4
"""Tokens of a stream whose gaps are not counted: other prompts of the load are computed meanwhile."""


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """Streams that begin together, each with a prompt of its own."""

    streams: int
    prompt_tokens: int
    output_tokens: int
    vocabulary: int
    sampling: str = "greedy"
    seed: int = 0
    first: int = 0
    """Number of the first stream, where several processes share a load."""
    keeps_tokens: bool = False
    """Whether the result has the token ids."""

    def prompt(self, number: int) -> list[int]:
        """Return the token ids of a stream's prompt."""
        drawn = random.Random(f"{self.prompt_tokens} {self.seed} {number}")
        return [drawn.randrange(5, self.vocabulary) for _ in range(self.prompt_tokens)]

    def options(self, number: int) -> dict[str, Any]:
        """Return the sampling options of a stream, by the names that vLLM and Tandem share."""
        seed = {"seed": 1 + number} if self.sampling.startswith("seeded") else {}
        return SAMPLINGS[self.sampling] | seed | {"max_tokens": self.output_tokens, "ignore_eos": True}


@dataclass(slots=True)
class Offered:
    """Result of a load, or of a process's share of it; times are of the monotonic clock."""

    began_at: float
    ended_at: float = 0.0
    tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Errors of streams that ended with one."""
    token_ids: list[list[int]] = field(default_factory=list)


Generate = Callable[[Sequence[int], dict[str, Any]], AsyncIterator[Sequence[int]]]
"""Request of (prompt, sampling options) that yields new token ids as they arrive."""


def private_output() -> TextIO:
    """Return this process's standard output for results alone; what libraries print goes to standard error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


async def answer_loads(generate: Generate, output: TextIO, about: dict[str, Any]) -> None:
    """Print `about`, then the result of each load on standard input, until it is closed."""
    loop = asyncio.get_running_loop()
    print(json.dumps(about), file=output, flush=True)
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        asked = json.loads(line)
        began_at = asked.pop("began_at")
        await asyncio.sleep(max(0.0, began_at - time.monotonic()))
        offered = await _offer(generate, StreamLoad(**asked), began_at)
        print(json.dumps(asdict(offered)), file=output, flush=True)


async def _offer(generate: Generate, load: StreamLoad, began_at: float) -> Offered:
    offered = Offered(began_at)

    async def stream(number: int, prompt: Sequence[int]) -> None:
        times, token_ids, sent_at = list[float](), list[int](), time.monotonic()
        try:
            async for new in generate(prompt, load.options(number)):
                times += [time.monotonic()] * len(new)
                token_ids += new
        except Exception as error:  # one lost stream is a result; the others go on
            offered.lost.append(f"{type(error).__name__}: {error}"[:300])
            return
        offered.ended_at = max(offered.ended_at, times[-1])
        offered.tokens += len(times)
        offered.ttft_ms.append(1e3 * (times[0] - sent_at))
        offered.gaps_ms += [1e3 * (later - earlier) for earlier, later in pairwise(times[FIRST_TOKENS:])]
        if load.keeps_tokens:
            offered.token_ids.append(token_ids)

    numbers = range(load.first, load.first + load.streams)
    await asyncio.gather(*(stream(number, load.prompt(number)) for number in numbers))
    return offered
