"""The shared store in replay: the conversation trace and made-up loads, with the store and without.

Eight H100 with Llama 3.1 8B; their pools are cut until the trace's prefixes do not fit. The store has 25 GB/s in each
direction for all together and 1 ms of latency, where the case does not say otherwise.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.progress import Progress

from bench.advice import H100, LLAMA, azure, mooncake
from bench.report import Bar
from simulator.cluster import START_S, SimCluster
from simulator.replay import Scenario, Setup, cluster_spec
from simulator.request import Outcome, TraceRequest
from simulator.results import ResultCounter, Results, Slo
from simulator.store import StoreSpec
from simulator.workloads import poisson, profile_named, requests_of

STORE = StoreSpec(capacity_bytes=20e12, bytes_per_s=25e9, writes_at_once=True)
TOLERANCE = 1.02
"""Ratio of mean TTFTs with the store and without, above which a case is worse, where noise does not explain it."""
SEEDS = 2
CHUNK = 50


@dataclass(frozen=True)
class Case:
    """Load, cluster and store."""

    name: str
    trace: Callable[[int], Iterable[TraceRequest]]
    """Trace of a seed."""
    scenario: Scenario
    num_blocks: int
    """Blocks of 64 tokens of each worker."""
    store: StoreSpec = STORE


def made_up(profile: str, rate: float, count: int) -> Callable[[int], Iterable[TraceRequest]]:
    def draw(seed: int) -> Iterable[TraceRequest]:
        requests = requests_of(profile_named(profile), poisson(rate, seed), seed, context=1 << 16)
        return (request for request, _ in zip(requests, range(count), strict=False))

    return draw


def conversation(rate: float, count: int) -> Callable[[int], Iterable[TraceRequest]]:
    return mooncake(rate, count)


ALL, SPLIT = Scenario("aggregated", 0, 8), Scenario("conditional", 3, 5)
THRASH = Case("conversation", conversation(4.0, 2500), ALL, 4000)
CASES = (
    Case("conversation, 3 prefill + 5 decode", conversation(3.0, 1000), SPLIT, 4000),
    Case("conversation, light", conversation(1.0, 500), ALL, 4000),
    Case("conversation, pools that hold most", conversation(3.0, 800), ALL, 9000),
    Case("conversation, 0.5 GB/s", conversation(3.0, 600), ALL, 4000, replace(STORE, bytes_per_s=5e8)),
    Case("conversation, 200 GB", conversation(3.0, 800), ALL, 4000, replace(STORE, capacity_bytes=2e11)),
    Case("conversation, written when evicted", conversation(3.0, 800), ALL, 4000, replace(STORE, writes_at_once=False)),
    Case("conversation, latency of 50 ms", conversation(3.0, 600), ALL, 4000, replace(STORE, latency_s=0.05)),
    Case("nothing shared", azure(20.0, 3000), ALL, 2500),
    Case("short chat", made_up("short-chat", 60.0, 4000), ALL, 1500),
    Case("tool calling", made_up("tool-calling", 20.0, 2000), ALL, 1500),
    Case("long documents", made_up("long-context-qa", 4.0, 600), ALL, 4000),
)


def run(case: Case, store: StoreSpec | None, seed: int = 0) -> tuple[Results, dict[int, float]]:
    """Return the results, and the TTFT of each request by its number."""
    setup = Setup(LLAMA, H100, 8, slo=Slo(5.0, 0.1), store=store, seed=seed)
    spec = cluster_spec(setup, case.scenario)
    workers = tuple((name, replace(worker, num_blocks=case.num_blocks)) for name, worker in spec.workers)
    tally = ResultCounter(setup.slo, START_S)
    ttfts: dict[int, float] = {}

    def ended(outcome: Outcome) -> None:
        tally.add(outcome)
        ttfts[outcome.request.number] = outcome.ttft_s

    cluster = SimCluster(replace(spec, workers=workers), ended)
    cluster.run(case.trace(seed))
    return tally.results(cluster.gaps, 1.0, 1.0, 1.0), ttfts


def ratio_of(sides: Sequence[tuple[dict[int, float], dict[int, float]]]) -> tuple[float, float]:
    """Return the ratio of mean TTFTs with the store and without, and the end of its 95 % interval below it.

    A bootstrap over spans of CHUNK consecutive requests, whose TTFTs depend on each other.
    """
    sums: list[tuple[float, float]] = []
    for ours, theirs in sides:
        numbers = sorted(ours.keys() & theirs.keys())
        chunks = [numbers[at : at + CHUNK] for at in range(0, len(numbers), CHUNK)]
        sums += [(sum(ours[n] for n in chunk), sum(theirs[n] for n in chunk)) for chunk in chunks]
    table = np.array(sums)
    drawn = table[np.random.default_rng(0).integers(0, len(table), (4000, len(table)))].sum(axis=1)
    ratio = table.sum(axis=0)
    return float(ratio[0] / ratio[1]), float(np.quantile(drawn[:, 0] / drawn[:, 1], 0.025))


def measure(progress: Progress) -> dict[str, Any]:
    task = progress.add_task("replays with the store and without", total=2 * SEEDS * (1 + len(CASES)))
    figures: dict[str, Any] = {}
    for case in (THRASH, *CASES):
        ttfts: list[tuple[dict[int, float], dict[int, float]]] = []
        hits = []
        for seed in range(SEEDS):
            runs = []
            for store in (case.store, None):
                runs.append(run(case, store, seed))
                progress.advance(task)
            ttfts.append((runs[0][1], runs[1][1]))
            hits.append(tuple(results.hit_rate for results, _ in runs))
        ratio, at_least = ratio_of(ttfts)
        means = [sum(rates) / SEEDS for rates in zip(*hits, strict=True)]
        figures[case.name] = {"ttft_ratio": ratio, "ttft_ratio_at_least": at_least, "hit_rates": means}
        progress.console.print(f"{case.name}: {figures[case.name]}", markup=False)
    return figures


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    thrash = figures[THRASH.name]
    hits = thrash["hit_rates"][0] / thrash["hit_rates"][1]
    worse = sum(each["ttft_ratio_at_least"] > TOLERANCE for each in figures.values())
    return [
        Bar("conversation trace: hit rate with the store / without", hits, 2.0, at_least=True),
        Bar("conversation trace: mean TTFT with the store / without", thrash["ttft_ratio"], 0.6),
        Bar(f"cases of {len(figures)} in which the mean TTFT is worse with the store", worse, 0),
    ]
