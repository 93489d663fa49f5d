"""Check of a plan: requests as it assumes them, through the clusters that it found."""

import math
import random
from collections.abc import Callable, Iterator

from sizing.comparison.replay import Run, replay
from sizing.plan.load import Lengths, OfferedLoad
from sizing.plan.search import Option
from workloads.request import TraceRequest


def requests_of(load: OfferedLoad, count: int, seed: int = 0) -> Iterator[TraceRequest]:
    """Yield Poisson arrivals with lognormal lengths; the cached part is a prefix common to all prompts."""
    rng, at_s = random.Random(seed), 0.0
    for number in range(count):
        at_s += rng.expovariate(load.rate)
        prompt, output = _length(rng, load.prompts), _length(rng, load.outputs)
        shared = round(prompt * load.hit_rate / 64)
        rest = -(-prompt // 64) - shared
        hash_ids = (*range(shared), *(1 << 20 | (number + place) % (1 << 20) for place in range(rest)))
        yield TraceRequest(number, at_s, prompt, output, hash_ids if shared else (), 64)


def check(option: Option, count: int, seed: int = 0, on_progress: Callable[[float], object] = lambda _: None) -> Run:
    """Run `count` requests of the plan's load through the option's cluster."""
    return replay(option.setup, option.scenario, requests_of(option.model.load, count, seed), on_progress)


def _length(rng: random.Random, lengths: Lengths) -> int:
    sigma = math.sqrt(math.log1p(lengths.variation**2))
    return max(1, round(lengths.mean * math.exp(sigma * rng.gauss(0, 1) - sigma**2 / 2)))
