"""Autoscaled pools beside fixed ones, over a day of the conversation trace whose rate swings tenfold.

`python -m bench.autoscale [--quick]`; --quick runs a tenth of it, to try the benchmark out.

The day is the first 2,000 requests of the trace in their own order, scaled to 1,726 s, then moved so that the rate
follows a sine (`simulator/traces/swing.py`): lowest at both ends, ten times that in the middle. The day is 50 times as
fast as a real one, while a worker takes 30 s to start (25 minutes of a real day): that is harder on the planner.

Both sides have the same routers, engines and GPUs. A worker costs from the moment of its request. The fixed fleet is
the smallest, of any numbers of prefill and decode workers, that keeps the SLO for as large a share of requests as the
planner did. The search assumes that one more worker never makes a fleet worse.
"""

import concurrent.futures
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rich.console import Console

from bench.report import Bar, conclude
from bench.traces import CONVERSATION, TICK_S
from planner.config import PoolConfig
from router.admission.config import AdmissionConfig
from simulator.autoscale import Autoscale
from simulator.gpus import gpu_named
from simulator.model_shape import DEFAULT_CONFIG, shape_of
from simulator.planned import policy_of
from simulator.replay import Run, Scenario, Setup, replay
from simulator.request import Outcome, TraceRequest
from simulator.results import Slo
from simulator.traces.reading import Trace, Window
from simulator.traces.swing import RateSwing

REQUESTS, QUICK = 2000, 200
RATE = 0.39
"""Factor on the trace's rate: the first 2,000 requests then take 1,726 s."""
FACTOR = 10.0
SLO = Slo(ttft_s=30.0, itl_s=0.1)
"""Mooncake's SLO for the service that the trace is from.

The longest prompt of a hundred, 85,000 tokens, takes longer by itself. By the routers' default every second prompt
would be long here, and only half of the lenders may compute long prompts. So the limit for long prompts is half of
the SLO, for both sides."""
START_S = 30.0
"""Seconds that a worker takes to start."""
LLAMA_70B = shape_of(
    "Llama 3.1 70B",
    DEFAULT_CONFIG
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
)
TP = 4
BLOCK_TOKENS = 256
MOST = 24
"""Largest number of workers of either pool."""
DECODES = (3, 2, 4, 1)
"""Decode workers of fixed fleets to try: more than the most streams of the day would fill."""


class Hopeless(Exception):
    """Signal that too many requests missed the SLO to reach the wanted share."""


@dataclass(frozen=True, slots=True)
class SloResult:
    """Result of one cluster."""

    name: str
    share: float
    """Share of requests within the SLO."""
    gpu_hours: float
    duration_s: float
    ttft_p95_s: float

    @property
    def mean_workers(self) -> float:
        return 3600 * self.gpu_hours / self.duration_s / TP


@cache
def day(requests: int) -> tuple[TraceRequest, ...]:
    even = list(Trace(CONVERSATION, Window(rate=RATE, spread_s=TICK_S, most=requests)))
    return tuple(RateSwing(even, FACTOR, even[-1].arrival_s))


def setup_of(workers: int) -> Setup:
    return Setup(
        LLAMA_70B,
        gpu_named("A100"),
        gpus=TP * workers,
        tp=TP,
        slo=SLO,
        block_tokens=BLOCK_TOKENS,
        admission=AdmissionConfig(long_prompt_s=SLO.ttft_s / 2),
    )


def planned(requests: int) -> tuple[SloResult, Run]:
    """Run the autoscaled cluster, from two workers on."""
    setup = setup_of(2)
    prefill = PoolConfig(max_workers=MOST, headroom=0.3)  # an SLO of 30 s lets first tokens wait
    patience = {"clear_s": SLO.ttft_s, "down_after_s": 30.0, "down_every_s": 10.0, "margin": 0.05}
    known = {"prefill": prefill, "prompt_tokens": 12_000.0} | patience
    autoscale = Autoscale(policy_of(setup, MOST, START_S).model_copy(update=known))
    run = replay(setup, Scenario("conditional", 1, 1, autoscale=autoscale), day(requests))
    return kept_of("planned", run), run


def fixed(requests: int, prefill: int, decode: int, least: float = 0.0) -> SloResult | None:
    """Run a fixed fleet; return None if it keeps less than the share `least`."""
    left = requests - least * requests + 1e-9

    def count(outcome: Outcome) -> None:
        nonlocal left
        left -= not SLO.kept(outcome)
        if left < 0:
            raise Hopeless

    try:
        run = replay(setup_of(prefill + decode), Scenario("conditional", prefill, decode), day(requests), on_end=count)
    except Hopeless:
        return None
    return kept_of(f"{prefill}P:{decode}D", run)


def kept_of(name: str, run: Run) -> SloResult:
    results = run.results
    return SloResult(name, results.kept_share, results.gpu_hours, results.duration_s, results.ttft_s.p95)


def smallest(pool: concurrent.futures.Executor, requests: int, least: float, most: int, console: Console) -> SloResult:
    """Return the smallest fixed fleet that keeps the share `least`, searching down from `most` workers.

    All fleets of a total are tried until one keeps the share; where none does, the search ends.
    """
    best: SloResult | None = None
    total = most
    while True:
        asked = {pool.submit(fixed, requests, total - decode, decode, least) for decode in DECODES if decode < total}
        found: SloResult | None = None
        for task in concurrent.futures.as_completed(asked):
            if not task.cancelled() and (kept := task.result()) is not None and found is None:
                found = kept
                for other in asked:
                    other.cancel()
        told = f"{found.name} keeps {found.share:.4f}" if found else "none does"
        console.print(f"{total} workers, as good as the planner: {told}")
        if found is not None:
            best, total = found, total - 1
        elif best is None:
            total += 1
        else:
            return best


def alike(pool: concurrent.futures.Executor, requests: int, workers: int) -> SloResult:
    """Return the best fixed fleet of so many workers."""
    asked = [pool.submit(fixed, requests, workers - decode, decode) for decode in DECODES if decode < workers]
    return max((kept for task in asked if (kept := task.result()) is not None), key=lambda kept: kept.share)


def hours(sizes: Sequence[Any], duration_s: float) -> list[dict[str, float]]:
    """Return the pool sizes at 25 moments."""
    step = max(1, len(sizes) // 24)
    return [
        {"share of the day": round(size.at_s / duration_s, 3), "prefill": size.prefill, "decode": size.decode}
        for size in sizes[::step]
    ]


def main() -> None:
    console = Console()
    requests = QUICK if "--quick" in sys.argv else REQUESTS
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        ours, run = pool.submit(planned, requests).result()
        console.print(f"planned: keeps {ours.share:.4f} with {ours.mean_workers:.2f} workers in the mean")
        same = alike(pool, requests, round(ours.mean_workers))
        console.print(f"the best fixed fleet of as many: {same.name} keeps {same.share:.4f}")
        least = smallest(pool, requests, ours.share, round(1.4 * ours.mean_workers), console)
    figures = {"planned": ours, "smallest fixed": least, "fixed of the same mean size": same}
    told = {
        name: {"share": kept.share, "gpu_hours": kept.gpu_hours, "workers": kept.mean_workers, "fleet": kept.name}
        for name, kept in figures.items()
    }
    console.print_json(data={"fleets": told, "sizes": hours(run.sizes, run.results.duration_s)})
    bars = [
        Bar(f"GPU-hours, of those of {least.name}, the smallest fleet as good", ours.gpu_hours / least.gpu_hours, 0.8),
        Bar(f"requests that miss the SLO, of those of {same.name}", (1 - ours.share) / (1 - same.share), 1.0),
    ]
    conclude("autoscale", bars, told, console)


if __name__ == "__main__":
    main()
