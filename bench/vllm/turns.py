"""Plain vLLM, `vllm serve` and one aggregated Tandem worker under the same loads in turns.

`bench/gpu_vllm.py` compares them on a GPU, `bench/vllm/aggregated.py` on CPUs.
"""

import asyncio
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.support.report import Bar, percentile
from bench.vllm.compared import quiet
from bench.vllm.sides import SERVE, TANDEM, TANDEM_HTTP, VLLM, Setting, Started, aggregated, alone, served
from bench.vllm.streams import SAMPLINGS, Offered, StreamLoad

LONG_PROMPTS = 4
"""Prompts a turn, one after the other, whose time to first token is measured."""
OTHER_PROMPTS = 5_000


@dataclass(slots=True)
class Figures:
    """Figures of one load on one side, a value a round."""

    tokens_per_s: list[float] = field(default_factory=list)
    itl_p50_ms: list[float] = field(default_factory=list)
    itl_mean_ms: list[float] = field(default_factory=list)
    ttft_p50_ms: list[float] = field(default_factory=list)

    def add(self, offered: Offered) -> None:
        self.tokens_per_s.append(offered.tokens / (offered.ended_at - offered.began_at))
        self.ttft_p50_ms.append(percentile(offered.ttft_ms, 0.5))
        if offered.gaps_ms:
            self.itl_p50_ms.append(percentile(offered.gaps_ms, 0.5))
            self.itl_mean_ms.append(statistics.mean(offered.gaps_ms))


@dataclass(frozen=True, slots=True)
class Loads:
    """Loads of a comparison."""

    streams: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    long_prompt_tokens: int
    """Tokens of the prompt whose time to first token is measured."""
    samplings: Sequence[str] = tuple(SAMPLINGS)

    def all(self, vocabulary: int) -> dict[str, StreamLoad]:
        """Return the loads by name."""
        lengths = self.prompt_tokens, self.output_tokens, vocabulary
        loads = {
            f"{count} {'stream' if count == 1 else 'streams'}, {sampling}": StreamLoad(count, *lengths, sampling)
            for sampling in self.samplings
            for count in self.streams
        }
        for number, (name, load) in enumerate(loads.items()):  # no prompt is one of another load: all would be cached
            loads[name] = replace(load, first=10_000 * number)
        return loads | {f"prompt of {self.long_prompt_tokens:,}": StreamLoad(1, self.long_prompt_tokens, 1, vocabulary)}

    def warm_up(self, vocabulary: int) -> list[StreamLoad]:
        """Return loads that make each side compile and capture what the others need."""
        widths = sorted({1, *self.streams}, reverse=True)
        short = [StreamLoad(width, 32, 8, vocabulary, each, seed=-1) for each in self.samplings for width in widths]
        return [*short, StreamLoad(1, self.long_prompt_tokens, 2, vocabulary, seed=-1)]


async def compare(
    setting: Setting,
    loads: Loads,
    rounds: int,
    together: bool,
    scratch: Path,
    console: Console,
    figures: dict[str, Any],
    over_http: bool = False,
) -> None:
    """Measure the sides in turns, and keep their medians in `figures` after each round.

    With `together` all are started once, and vLLM's own processes are stopped during the turns of others. Otherwise
    each turn starts its side and ends it. With `over_http` there are two more columns: `vllm serve`, and Tandem by its
    HTTP API.
    """
    measured: dict[str, dict[str, Figures]] = {}

    async def turn(side: Started, name: str, load: StreamLoad, number: int) -> None:
        for column, clients in side.clients.items():
            found = measured.setdefault(name, {}).setdefault(column, Figures())
            if column in (SERVE, TANDEM_HTTP):  # what was asked over gRPC is cached
                load = replace(load, first=load.first + OTHER_PROMPTS)
            for repeat in range(LONG_PROMPTS if load.output_tokens == 1 else 1):
                found.add(await clients.offer(replace(load, seed=LONG_PROMPTS * number + repeat)))
            last = {each: values[-1] for each, values in asdict(found).items() if values}
            shown = {each: round(value, 2) for each, value in last.items()}
            console.print(f"round {number}, {name}, {column}:", shown)

    async def warm(side: Started) -> None:
        for column, clients in side.clients.items():
            if column == VLLM:
                figures["plain vllm"] = clients.about
            for load in loads.warm_up(setting.vocabulary):
                await clients.offer(load)

    starts = [lambda: alone(setting, scratch), lambda: aggregated(setting, over_http)]
    if over_http:
        starts.append(lambda: served(setting, scratch))
    figures["loads"] = {}
    all_loads = loads.all(setting.vocabulary).items()
    async with AsyncExitStack() as stack:
        running: list[Started] = []
        if together:
            running = await asyncio.gather(*(stack.enter_async_context(start()) for start in starts))
            for side in running:
                with others_paused(side, running):
                    await warm(side)
        for number in range(rounds):
            for name, load in all_loads if together else ():
                for side in running:
                    with others_paused(side, running):
                        await turn(side, name, load, number)
            for start in () if together else starts:
                async with start() as side:
                    await warm(side)
                    for name, load in all_loads:
                        await turn(side, name, load, number)
            figures["loads"] = {name: _medians(sides) for name, sides in measured.items()}


@contextlib.contextmanager
def others_paused(side: Started, running: Sequence[Started]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for process in (each for other in running if other is not side for each in other.to_pause):
            stack.enter_context(quiet(process))
        yield


def _medians(sides: dict[str, Figures]) -> dict[str, dict[str, float]]:
    """Return the medians of the rounds by figure and column, and the ratios of Tandem's to vLLM's."""
    found: dict[str, dict[str, float]] = {}
    for each in fields(Figures):
        values = {side: getattr(rounds, each.name) for side, rounds in sides.items()}
        if all(values.values()):
            medians = {side: statistics.median(rounds) for side, rounds in values.items()}
            found[each.name] = medians | {"ratio": medians[TANDEM] / medians[VLLM]}
            if SERVE in medians:
                found[each.name]["ratio over HTTP"] = medians[TANDEM_HTTP] / medians[SERVE]
    return found


@dataclass(frozen=True, slots=True)
class Limits:
    """Bars of a comparison: Tandem's figure / plain vLLM's."""

    tokens_per_s: float
    """At least."""
    itl_p50_ms: float
    ttft_p50_ms: float


def bars_of(model: str, loads: dict[str, dict[str, dict[str, float]]], limits: Limits) -> list[Bar]:
    """Return the bars of one model."""
    bars: list[Bar] = []
    for name, found in loads.items():
        what = f"{model}, {name}"
        if name.startswith("prompt"):
            bars.append(Bar(f"{what}: TTFT / plain vLLM's", found["ttft_p50_ms"]["ratio"], limits.ttft_p50_ms))
            continue
        tokens, itl = found["tokens_per_s"]["ratio"], found["itl_p50_ms"]["ratio"]
        bars.append(Bar(f"{what}: output tokens/s / plain vLLM's", tokens, limits.tokens_per_s, at_least=True))
        bars.append(Bar(f"{what}: ITL p50 / plain vLLM's", itl, limits.itl_p50_ms))
        if (over_http := found["tokens_per_s"].get("ratio over HTTP")) is not None:
            bars.append(Bar(f"{what}, over HTTP: output tokens/s / `vllm serve`", over_http, 1.0, at_least=True))
            itl = found["itl_p50_ms"]["ratio over HTTP"]
            bars.append(Bar(f"{what}, over HTTP: ITL p50 / `vllm serve`", itl, limits.itl_p50_ms))
    return bars
