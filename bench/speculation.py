"""`make bench-speculation`: milliseconds per token with and without speculation, of the same requests, in turns.

Each cluster is a router and a decode worker on all cores; they differ in `speculation` only. One idles while the other
is measured, and their outputs are compared token by token. There are three kinds of text:

    the demo model     a chat with the earlier stories in the prompt. Greedy, where much repeats; and sampled at 0.7,
                       where little does, alone and 16 at once: the cost of speculation
    code edits         a text of 500 words repeated with one word in 16 replaced, as the prompt asks
    summaries          a text of 500 words, of which ten pieces of 12 words are repeated, joined by new words

A model of Qwen2 0.5 B's shape that copies (`bench/copying.py`) serves the latter two: random weights repeat nothing,
and the demo model has not learnt to edit. They are measured with n-grams and with a draft model.
"""

import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.copying import SMALL, copying_model
from bench.engine import Tandem
from bench.report import OUT, Bar, conclude
from protos import inference_pb2 as pb
from tandem.cli.demo import SUBJECTS
from tandem.client import Client
from tandem.storyteller import STORYTELLER

ROUNDS = 3
STORY_TOKENS, STORIES = 120, 4
WORDS = range(1000, 150_000)
END_OF_PART = 999
CROWD = 16
MAX_RATIO, MAX_COST = 0.6, 1.03


@dataclass(slots=True)
class BenchRequest:
    """Request, by tokens or by messages."""

    max_tokens: int
    token_ids: Sequence[int] = ()
    messages: Sequence[tuple[str, str]] = ()
    temperature: float = 0.0
    never: Sequence[int] = ()
    expected: Sequence[int] = ()
    """Expected output, where it is known."""


@dataclass(slots=True)
class BenchAnswer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    speculation: pb.Speculation = field(default_factory=pb.Speculation)

    @property
    def ms_per_token(self) -> float:
        return 1e3 * (self.times[-1] - self.times[0]) / (len(self.times) - 1)


async def say(client: Client, ask: BenchRequest, seed: int = 0) -> BenchAnswer:
    bias = dict.fromkeys(ask.never, -100.0)
    sampling = pb.Sampling(
        max_tokens=ask.max_tokens, temperature=ask.temperature, seed=seed, ignore_eos=True, logit_bias=bias
    )
    what: dict[str, Any] = {"token_ids": ask.token_ids} if ask.token_ids else {"messages": ask.messages}
    said = BenchAnswer()
    async for message in client.generate(**what, sampling=sampling, timeout_s=300):
        said.token_ids += message.token_ids
        said.text += message.text
        said.times += [time.monotonic()] * len(message.token_ids)
        if message.HasField("finish"):
            said.speculation.CopyFrom(message.finish.receipt.speculation)
    assert not ask.expected or said.token_ids == ask.expected, "the model does not copy"
    return said


# ------------------------------------------------------------------------------------------------------ the requests


async def chat(client: Client, temperature: float) -> list[BenchRequest]:
    """Return the turns of a chat after the first, each with the earlier stories in its prompt."""
    history: list[tuple[str, str]] = []
    asks: list[BenchRequest] = []
    for subject in SUBJECTS[: STORIES + 1]:
        history.append(("user", f"Tell me a story about {subject}."))
        ask = BenchRequest(STORY_TOKENS, messages=list(history), temperature=temperature)
        history.append(("assistant", (await say(client, ask, len(asks))).text))
        asks.append(ask)
    return asks[1:]


def told(text: Sequence[int], target: Sequence[int]) -> BenchRequest:
    """Return a request to output `target`, which begins as `text` does.

    Where `target` continues otherwise than `text`, the prompt shows that continuation after the text, and a logit bias
    excludes the text's own.
    """
    following = dict(pairwise(text))
    parts: list[int] = []
    never = {END_OF_PART}
    open_part = False
    for word, then in pairwise(target):
        if following.get(word) == then:
            parts += [END_OF_PART] if open_part else []
            open_part = False
            continue
        parts += [then] if open_part else [word, then]
        open_part = True
        never |= {following[word]} if word in following else set()
    assert not never & set(target)
    # the first part has no token before it to note
    prompt = [END_OF_PART, *text, END_OF_PART, *parts, END_OF_PART, target[0]]
    return BenchRequest(len(target) - 1, prompt, never=sorted(never), expected=target[1:])


def code_edit(seed: int) -> BenchRequest:
    """Return a text in which no word repeats, new words included, so that a word determines the next."""
    words = random.Random(seed).sample(WORDS, 540)
    text, new = words[:500], iter(words[500:])
    target = [next(new) if place % 16 == 9 and place < 490 else word for place, word in enumerate(text[:200])]
    return told(text, target)


def summary(seed: int) -> BenchRequest:
    generator = random.Random(seed)
    words = generator.sample(WORDS, 540)
    text, new = words[:500], iter(words[500:])
    target = text[:12]
    for start in sorted(generator.sample(range(20, 480, 14), 10)):
        target += [next(new), next(new), *text[start : start + 12]]
    return told(text, target)


# ---------------------------------------------------------------------------------------------------------- measuring


def serving(model: Path, speculation: str) -> Tandem:
    """Start a decode worker with users' defaults, but for its pool and `speculation`."""
    cores = sorted(os.sched_getaffinity(0))
    return Tandem(model, cores, 0, kv_memory_mib=256, speculation=speculation, max_prefill_tokens=None)


@dataclass(slots=True)
class Compared:
    """Milliseconds per token of both sides, for each request in each round."""

    off: list[float] = field(default_factory=list)
    on: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def add(self, off: BenchAnswer, on: BenchAnswer) -> None:
        assert off.token_ids == on.token_ids, "guesses changed what was said"
        self.off.append(off.ms_per_token)
        self.on.append(on.ms_per_token)
        self.drafted += on.speculation.draft_tokens
        self.accepted += on.speculation.accepted_tokens

    @property
    def ratio(self) -> float:
        return statistics.median(self.on) / statistics.median(self.off)

    def figures(self) -> dict[str, Any]:
        return {
            "off_ms_per_token": statistics.median(self.off),
            "on_ms_per_token": statistics.median(self.on),
            "ratio": self.ratio,
            "pairs": sorted(on / off for on, off in zip(self.on, self.off, strict=True)),
            "guessed": self.drafted,
            "accepted": self.accepted,
        }


async def alone(off: Client, on: Client, asks: Sequence[BenchRequest]) -> Compared:
    """Run one request at a time."""
    compared = Compared()
    for client in (off, on):
        await say(client, asks[0])
    for _ in range(ROUNDS):
        for seed, ask in enumerate(asks):
            compared.add(await say(off, ask, seed), await say(on, ask, seed))
    return compared


async def crowded(off: Client, on: Client, asks: Sequence[BenchRequest]) -> Compared:
    """Run CROWD requests at once."""
    compared = Compared()
    for client in (off, on):
        await say(client, asks[0])
    for _ in range(ROUNDS):
        sides = [
            await asyncio.gather(*(say(client, asks[seed % len(asks)], seed) for seed in range(CROWD)))
            for client in (off, on)
        ]
        for pair in zip(*sides, strict=True):
            compared.add(*pair)
    return compared


async def measure(console: Console, model: Path, speculation: str, kinds: dict[str, Any]) -> dict[str, Compared]:
    compared: dict[str, Compared] = {}
    async with serving(model, "off") as off_side, serving(model, speculation) as on_side:
        off, on = off_side.client, on_side.client
        for name, (compare, asks_of) in kinds.items():
            asks = await asks_of(off)
            compared[name] = found = await compare(off, on, asks)
            console.print(
                f"{name}: {statistics.median(found.off):.2f} ms/token, {statistics.median(found.on):.2f} with guesses,"
                f" ratio {found.ratio:.2f}; {found.accepted} of {found.drafted} were right"
            )
    return compared


async def main() -> None:
    console = Console()
    model, draft = copying_model(OUT / "copying-0.5b"), copying_model(OUT / "copying-small", SMALL)

    def written(make: Any) -> Any:
        async def asks(client: Client) -> list[BenchRequest]:
            return [make(seed) for seed in range(2)]

        return asks

    copied = {"code edits": (alone, written(code_edit)), "summaries": (alone, written(summary))}
    found = await measure(
        console,
        STORYTELLER,
        "ngram",
        {
            "demo, chat": (alone, lambda client: chat(client, 0.0)),
            "demo, sampled chat": (alone, lambda client: chat(client, 0.7)),
            "demo, 16 sampled chats": (crowded, lambda client: chat(client, 0.7)),
        },
    )
    found |= await measure(console, model, "ngram", copied)
    found |= await measure(console, model, str(draft), {f"{name}, draft model": of for name, of in copied.items()})
    cost = ("demo, sampled chat", "demo, 16 sampled chats")
    bars = [
        Bar(f"{name}: ms per token, with / without", of.ratio, MAX_COST if name in cost else MAX_RATIO)
        for name, of in found.items()
    ]
    conclude("speculation", bars, {name: of.figures() for name, of in found.items()}, console)


if __name__ == "__main__":
    asyncio.run(main())
