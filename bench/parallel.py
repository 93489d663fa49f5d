"""`python -m bench.parallel`: one rank on all cores beside two ranks on half of them each, in turns.

Engines run in processes of their own, without frontend and gRPC. Decode: streams that run alone or eight at once.
Prefill: a prompt of 512 tokens in one chunk, up to its first token. Two ranks together read the weights as often as
one, so on one memory bus decoding cannot gain; the sums cost time.
"""

import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console

from bench.models import qwen2_half_b
from bench.report import OUT, conclude
from engine.config import WorkerConfig
from engine.core_types import SamplingParams
from engine.messages.from_engine import FromEngine, Ready, StartFailed, Token
from engine.messages.to_engine import Generate
from engine.process.child_engine import ChildEngine
from engine.process.engine_client import EngineListener
from engine.process.spec import EngineSpec

ROUNDS = 5
TOKENS = 24
PROMPT = 512
DTYPES = ("bfloat16", "float32")


class Measured(EngineListener):
    """Engine with the times of its tokens."""

    def __init__(self, ranks: int, dtype: str, model: Any) -> None:
        cores = tuple(sorted(os.sched_getaffinity(0)))
        settings = {"model": model, "dtype": dtype, "device": "cpu", "speculation": "off", "cores": cores}
        config = WorkerConfig.parse(settings | {"tensor_parallel": ranks, "kv_memory_mib": 128})
        self.host = ChildEngine(EngineSpec(config, "prefill", f"bench-{os.getpid()}-{ranks}-{dtype}"))
        self.times: dict[str, list[float]] = {}
        self._messages = asyncio.Event()
        self._ready = self._stopping = False
        self._count = 0

    def on_messages(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            match message:
                case Token(request_id):
                    self.times[request_id].append(time.perf_counter())
                case Ready():
                    self._ready = True
                case StartFailed(reason):
                    raise SystemExit(reason)
        self._messages.set()

    def ended(self, how: str) -> None:
        if not self._stopping:
            raise SystemExit(how)

    async def stop(self) -> None:
        self._stopping = True
        await self.host.stop()

    async def start(self) -> None:
        self.host.start(self)
        while not self._ready:
            await self._changed()

    async def step_ms(self, streams: int) -> float:
        """Return the median gap between tokens, in milliseconds, while so many streams decode."""
        names = [self._ask(random.Random(number).choices(range(1000), k=16), TOKENS) for number in range(streams)]
        while any(len(self.times[name]) < TOKENS for name in names):
            await self._changed()
        # the first tokens wait for prompts
        late = [pair for name in names for pair in list(pairwise(self.times[name]))[4:]]
        return statistics.median((b - a) * 1e3 for a, b in late)

    async def prompt_ms(self) -> float:
        """Return milliseconds from a new prompt to its first token."""
        self._count += 1
        began = time.perf_counter()
        name = self._ask(random.Random(f"prompt {self._count}").choices(range(1000), k=PROMPT), 1)
        while not self.times[name]:
            await self._changed()
        return (self.times[name][0] - began) * 1e3

    def _ask(self, prompt: list[int], max_tokens: int) -> str:
        name = f"{len(self.times)}"
        self.times[name] = []
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.host.send([Generate(name, tuple(prompt), (), sampling, name, 0, borrow=False)])
        return name

    async def _changed(self) -> None:
        self._messages.clear()
        await self._messages.wait()


async def measure(dtype: str, console: Console) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds by measurement, then by number of ranks."""
    model = qwen2_half_b(OUT / "qwen2-0.5b")
    engines = {ranks: Measured(ranks, dtype, model) for ranks in (1, 2)}
    await asyncio.gather(*(engine.start() for engine in engines.values()))
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(ROUNDS + 1):
        for ranks, engine in engines.items():
            figures = {
                "decode, 1 stream": await engine.step_ms(1),
                "decode, 8 streams": await engine.step_ms(8),
                f"prompt of {PROMPT}": await engine.prompt_ms(),
            }
            for what, value in figures.items() if number else ():  # the first round warms up
                found.setdefault(what, {}).setdefault(str(ranks), []).append(value)
    for engine in engines.values():
        await engine.stop()
    for what, by_ranks in found.items():
        one, two = (statistics.median(by_ranks[ranks]) for ranks in ("1", "2"))
        console.print(f"{dtype} {what}: 1 rank {one:.1f} ms, 2 ranks {two:.1f} ms, ratio {two / one:.2f}")
    return found


async def main() -> None:
    console = Console()
    conclude("parallel", [], {dtype: await measure(dtype, console) for dtype in DTYPES}, console)


if __name__ == "__main__":
    asyncio.run(main())
