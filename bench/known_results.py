"""What the literature found, in the simulator: where disaggregation gains, and where it gains nothing.

`python -m bench.known_results [NAME]`: all cases, or those whose name has NAME in it.

Goodput is DistServe's: the highest rate at which 90 % of the requests keep TTFT and ITL, for each GPU, or for each USD
where the GPUs differ. It is found by raising or lowering the rate of one and the same trace by RATIO, from where
`tandem plan`'s formulas put it; of several splits the best counts. Clusters of both kinds are about equally
large or dear. Both sides have the same router and the same engine.

Two things called aggregated. The papers held theirs against engines that computed a prompt in one step, all running
streams waiting (`whole prompts`); today's, ours too, compute it in chunks beside them (`chunks`).

DistServe (OSDI 24, table 1): OPT on A100, ShareGPT (chat) and LongBench (summaries), its SLOs. Splitwise (ISCA 24):
Llama 2 70B on machines of 8 GPUs, the lengths of Azure's coding and conversation services, p90 SLOs of 3 x the TTFT
and 1.5 x the TBT of a request alone on a machine of 8 A100; prefill on H100 and decode on A100 there. Lengths are
lognormal by the means that they state, not their traces.
"""

import dataclasses
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from bench.report import Bar, conclude
from simulator.gpus import GPUS
from simulator.model_shape import DEFAULT_CONFIG, ModelShape, open_shape, shape_of
from simulator.plan.check import requests_of
from simulator.plan.load import Load
from simulator.plan.search import GOAL, apart_of
from simulator.plan.together import Together
from simulator.replay import Scenario, Setup, bill, replay
from simulator.report import MARGIN
from simulator.request import TraceRequest
from simulator.results import Slo

RATIO = 1.1
WHOLE = 8192
"""Prompt tokens of a step: longer than the prompts."""
OPT = DEFAULT_CONFIG | {"vocab_size": 50272, "tie_word_embeddings": True, "torch_dtype": "float16"}


def opt(name: str, layers: int, heads: int, hidden: int) -> ModelShape:
    """Its MLP has two matrices of 4 x hidden, where `shape_of` counts three: so two thirds of that."""
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    return shape_of(name, OPT | sizes | {"hidden_size": hidden, "intermediate_size": 8 * hidden // 3})


LLAMA = open_shape(None)
LLAMA_70B = shape_of(
    "Llama 2 70B",
    DEFAULT_CONFIG
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"vocab_size": 32000},
)
OPT_13B, OPT_66B = opt("OPT 13B", 40, 40, 5120), opt("OPT 66B", 64, 72, 9216)
A100, H100, A10 = GPUS["A100"], GPUS["H100"], GPUS["A10"]
MAX_RAISES = 8


@dataclass(frozen=True)
class Case:
    """A setting, and the sign that was found there."""

    name: str
    setup: Setup
    load: Load
    """Its rate is looked for, unless `fixed`."""
    together: int
    """Workers of the aggregated cluster."""
    splits: tuple[tuple[int, int], ...]
    gains: bool
    """Says the literature, over whole prompts; where it says no gain, over chunks too."""
    count: int = 400
    """Requests, at least; more where streams last long."""
    fixed: bool = False
    requests: Callable[[Load, int], Iterator[TraceRequest]] = requests_of


def agents(load: Load, count: int) -> Iterator[TraceRequest]:
    """Coding agents: 60 sessions, each turn 1,024 tokens longer than the last, from 6,144 to 22,528, then anew.
    All of them are as large as the KV pools of two H100."""
    rng, at_s = random.Random(0), 0.0
    sessions = [(place, rng.randrange(6, 22)) for place in range(60)]
    for number in range(count):
        at_s += rng.expovariate(load.rate)
        place = rng.randrange(len(sessions))
        name, size = sessions[place]
        hash_ids = tuple(name * 64 + block for block in range(size))
        yield TraceRequest(number, at_s, 1024 * size, round(load.output), hash_ids, 1024)
        sessions[place] = (name, size + 1) if size < 22 else (name + len(sessions), 6)


CASES = (
    Case(
        "DistServe, summaries: OPT 66B, 15 s, 150 ms",
        Setup(OPT_66B, A100, gpus=4, tp=4, slo=Slo(15, 0.15)),
        Load(1, 1700, 90),
        together=4,
        splits=((2, 2), (3, 1)),
        gains=True,
    ),
    Case(
        "DistServe, summaries, a stricter SLO: 15 s, 60 ms",
        Setup(OPT_66B, A100, gpus=4, tp=4, slo=Slo(15, 0.06)),
        Load(1, 1700, 90),
        together=4,
        splits=((2, 2), (3, 1)),
        gains=True,
    ),
    Case(
        "DistServe, chat: OPT 13B, 0.25 s, 100 ms",
        Setup(OPT_13B, A100, gpus=4, slo=Slo(0.25, 0.1)),
        Load(1, 300, 200, variation=0.8),
        together=4,
        splits=((2, 2),),
        gains=True,
    ),
    Case(
        "DistServe, chat, a stricter SLO: OPT 66B, 1 s, 60 ms",
        Setup(OPT_66B, A100, gpus=4, tp=4, slo=Slo(1.0, 0.06)),
        Load(1, 300, 200, variation=0.8),
        together=4,
        splits=((2, 2),),
        gains=True,
    ),
    Case(
        "Splitwise, coding: Llama 2 70B, per USD",
        Setup(LLAMA_70B, H100, gpus=8, tp=8, decode_gpu=A100, slo=Slo(0.9, 0.026)),
        Load(1, 2048, 28, variation=0.8),
        together=4,
        splits=((3, 1), (4, 1)),
        gains=True,
    ),
    Case(
        "Splitwise, conversation: Llama 2 70B, per USD",
        Setup(LLAMA_70B, H100, gpus=8, tp=8, decode_gpu=A100, slo=Slo(0.54, 0.026)),
        Load(1, 1155, 211, variation=0.8),
        together=4,
        splits=((2, 1), (3, 2)),
        gains=True,
    ),
    Case(
        "long prompts, strict ITL: Llama 3.1 8B, 1 s, 12 ms",
        Setup(LLAMA, H100, gpus=4, slo=Slo(1.0, 0.012)),
        Load(1, 3000, 200),
        together=4,
        splits=((2, 2),),
        gains=True,
    ),
    Case(
        "short prompts: Llama 3.1 8B, 1 s, 100 ms",
        Setup(LLAMA, A10, gpus=3, slo=Slo(1.0, 0.1)),
        Load(1, 100, 150),
        together=3,
        splits=((1, 2), (2, 1)),
        gains=False,
    ),
    Case(
        "low load: one request/s of 1,000 + 200 tokens",
        Setup(LLAMA, H100, gpus=1, slo=Slo(1.0, 0.05)),
        Load(1, 1000, 200),
        together=1,
        splits=((1, 1),),
        gains=False,
        fixed=True,
    ),
    Case(
        "coding agents, KV pools full: 95 % of a prompt seen before",
        Setup(LLAMA, H100, gpus=2, slo=Slo(1.0, 0.04)),
        Load(2.5, 14_000, 200, hit_rate=0.9, variation=0.0),
        together=2,
        splits=((1, 1),),
        gains=False,
        count=400,
        fixed=True,
        requests=agents,
    ),
)


def goodput(case: Case, setup: Setup, scenario: Scenario) -> float:
    """Requests/s that keep the SLO, at the highest rate at which GOAL of them do; 0: at none that was tried."""
    if case.fixed:
        return case.load.rate * kept(case, setup, scenario, case.load.rate)
    rate = planned(setup, scenario, case.load)
    within = kept(case, setup, scenario, rate) >= GOAL
    for _ in range(MAX_RAISES):
        tried = rate * RATIO if within else rate / RATIO
        if (kept(case, setup, scenario, tried) >= GOAL) != within:
            return rate if within else tried
        rate = tried
    return rate if within else 0.0


def kept(case: Case, setup: Setup, scenario: Scenario, rate: float) -> float:
    """Share of the requests, of a trace that lasts five times as long as a stream, or is of 800 requests."""
    count = max(case.count, min(800, round(5 * rate * case.load.output * setup.slo.itl_s)))
    trace = case.requests(dataclasses.replace(case.load, rate=rate), count)
    return replay(setup, scenario, trace).results.kept_share


def planned(setup: Setup, scenario: Scenario, load: Load) -> float:
    """The rate by the formulas."""
    low, high = 0.01, 1000.0
    for _ in range(30):
        rate = math.sqrt(low * high)
        sized = dataclasses.replace(load, rate=rate)
        model = apart_of(setup, sized, scenario.prefill, scenario.decode) if scenario.apart else None
        share = (model or Together(setup, sized, scenario.decode)).kept
        low, high = (rate, high) if share >= GOAL else (low, rate)
    return low


def measure(case: Case, advance: Callable[[], object]) -> dict[str, Any]:
    """Goodput for each USD an hour, and for each GPU, of all clusters of a case."""
    whole = dataclasses.replace(case.setup, decode_chunk=WHOLE)
    together = Scenario("aggregated", 0, case.together)
    clusters = {"whole prompts": (whole, together), "chunks": (case.setup, together)}
    for prefill, decode in case.splits:
        clusters[f"{prefill}P:{decode}D"] = (case.setup, Scenario("disaggregated", prefill, decode))
    figures: dict[str, dict[str, float]] = {}
    for name, (setup, scenario) in clusters.items():
        found = goodput(case, setup, scenario)
        gpus, usd_per_hour = bill(setup, scenario)
        figures[name] = {"per_s": found, "per_gpu": found / gpus, "per_usd": 3600 * found / usd_per_hour}
        advance()
    unit = "per_usd" if case.setup.decode_gpu is not None else "per_gpu"
    best = max((name for name in figures if name.endswith("D")), key=lambda name: figures[name][unit])
    return {
        "clusters": figures,
        "best split": best,
        "unit": unit,
        "over whole prompts": figures[best][unit] / figures["whole prompts"][unit],
        "over chunks": figures[best][unit] / figures["chunks"][unit],
    }


def bars_of(case: Case, measured: dict[str, Any]) -> Iterator[Bar]:
    """The sign that the literature found."""
    if case.gains:
        name = f"{case.name}: goodput {measured['best split']} / aggregated, whole prompts"
        yield Bar(name, measured["over whole prompts"], 1 + MARGIN, at_least=True)
    else:
        yield Bar(f"{case.name}: goodput / aggregated, chunks", measured["over chunks"], 1 + MARGIN)


def row_of(name: str, measured: dict[str, Any]) -> str:
    """For a table: requests/s for each GPU, or for each 3600 USD an hour."""
    each = ", ".join(f"{cluster} {found[measured['unit']]:.3g}" for cluster, found in measured["clusters"].items())
    return f"| {name} | {each} | {measured['over whole prompts']:.2f} | {measured['over chunks']:.2f} |"


def main() -> None:
    console = Console()
    wanted = [case for case in CASES if all(word in case.name for word in sys.argv[1:])]
    bars: list[Bar] = []
    figures: dict[str, Any] = {}
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        for case in wanted:
            task = progress.add_task(case.name, total=2 + len(case.splits))
            figures[case.name] = measure(case, lambda task=task: progress.advance(task))  # type: ignore[misc]
            bars += bars_of(case, figures[case.name])
            progress.console.print(row_of(case.name, figures[case.name]))
    conclude("known_results", bars, figures, console)


if __name__ == "__main__":
    main()
