"""Comparison of clusters by goodput, with its interval: whether to disaggregate, told from noise.

Two kinds of chance are in a difference of goodput, and each has its remedy.

- **The trace is a sample of a load.** Requests late together were in the same queue, so that neighbours are not
  independent. Blocks of consecutive requests are resampled (bootstrap), the same ones in all clusters and all seeds:
  the difference is paired, since every cluster gets the same requests.
- **A run draws at random** when each request arrives within `--spread`, and which of several `--routers` it goes to.
  Nothing else in the simulator is random: placement, scheduling and their ties are not. A seed draws both anew, and
  goodput is the mean over seeds. Without either, all seeds give the same run, and one is enough.

Seeds do not make a trace longer, so they narrow the second part only. For the first, replay more requests. Replays of
resampled traces were rejected: a block that comes twice would find its own prefixes in the caches, and they add
nothing to what the trace says.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sizing.cluster.cluster import FleetMaker
from sizing.comparison.replay import Run, Scenario, Setup, replay
from workloads.request import BadSetup, EndState, Outcome, TraceRequest

Verdict = Literal["disaggregate", "aggregate", "even"]
Blocks = npt.NDArray[np.float64]
MARGIN = 0.03
"""Smallest relative difference of goodput that matters: the timing model is no more exact."""
BLOCKS = 20
"""Blocks of a trace: as long as they can be, as queues last long, and enough for an interval."""
LEAST_BLOCKS = 8
"""Smallest number of blocks with an interval; so a trace of fewer requests tells nothing."""
JOINED = (1, 2, 4)
"""Numbers of neighbouring blocks taken as one, to see whether blocks are independent."""
LEAST_SEEDS = 4
"""Smallest number of seeds whose own variance is trusted."""
RESAMPLES = 10_000
LEVELS = (0.05, 0.0294, 0.0221, 0.0182, 0.0158, 0.0142, 0.0130, 0.0120, 0.0112, 0.0106)
"""Chance that a single interval may miss, by the largest number of seeds; one interval is looked at after each seed,
and all of them together miss with a chance of 5 % (Pocock, 1977)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run, and its goodput by blocks of requests."""

    run: Run
    blocks: Blocks
    """Goodput of each block; their sum is the run's."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Goodput of the best split cluster beside the aggregated one; bounds are those of the difference."""

    split: Scenario
    together_by_seed: tuple[float, ...]
    split_by_seed: tuple[float, ...]
    lower: float
    """Lower bound of the 95 % interval, in requests per second and GPU, as is `upper`."""
    upper: float

    @property
    def together(self) -> float:
        return fmean(self.together_by_seed)

    @property
    def apart(self) -> float:
        return fmean(self.split_by_seed)

    def relative(self, difference: float) -> float:
        """Return a difference as a share of the aggregated cluster's goodput."""
        if self.together > 0:
            return difference / self.together
        return math.copysign(math.inf, difference) if difference else 0.0

    @property
    def change(self) -> float:
        """Relative difference."""
        return self.relative(self.apart - self.together)

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the relative difference."""
        return self.relative(self.lower), self.relative(self.upper)

    @property
    def verdict(self) -> Verdict:
        """Verdict: even, unless the interval excludes 0 and the difference matters."""
        if self.lower > 0 and self.change > MARGIN:
            return "disaggregate"
        if self.upper < 0 and self.change < -MARGIN:
            return "aggregate"
        return "even"

    @property
    def settled(self) -> bool:
        """Whether the interval decides: it excludes 0, or every difference that matters."""
        lower, upper = self.interval
        return self.verdict != "even" or (lower >= -MARGIN and upper <= MARGIN)

    def as_json(self) -> dict[str, Any]:
        """Return the figures; bounds may be infinite."""
        lower, upper = self.interval
        return {
            "split": self.split.name,
            "change": self.change,
            "interval": [lower, upper],
            "confidence": 1 - LEVELS[0],
            "margin": MARGIN,
            "settled": self.settled,
            "seeds": len(self.together_by_seed),
            "goodput_per_gpu": {"aggregated": self.together_by_seed, "split": self.split_by_seed},
        }


def sample(
    setup: Setup,
    scenario: Scenario,
    trace: Iterable[TraceRequest],
    on_progress: Callable[[float], object] = lambda _: None,
    make_fleet: FleetMaker | None = None,
) -> Sample:
    """Run a scenario, and note which requests keep the SLO."""
    kept: list[int] = []

    def ended(outcome: Outcome) -> None:
        if outcome.end_state is EndState.FINISHED and setup.slo.kept(outcome):
            kept.append(outcome.request.number)

    run = replay(setup, scenario, trace, on_progress, ended, make_fleet)
    num_requests = run.results.requests
    num_blocks = min(BLOCKS, num_requests)
    counts = np.bincount(np.array(kept, int) * num_blocks // max(1, num_requests), minlength=num_blocks)
    return Sample(run, counts.astype(np.float64) * (run.results.goodput_per_gpu / max(1, len(kept))))


def check_seeds(repeat: int) -> None:
    """Check the largest number of seeds.

    Raises BadSetup.
    """
    if not 1 <= repeat <= len(LEVELS):
        raise BadSetup("repeat", f"must be 1 to {len(LEVELS)}, not {repeat}")


def settle(first: Sequence[Sample], most: int, again: Callable[[int, int], Sample]) -> Comparison:
    """Compare an aggregated cluster, the first sample, with split ones, over more seeds while undecided.

    `again` runs the cluster of a place in `first` with the seed of a number, from 1 to `most` - 1. Clusters that are
    clearly worse than the best split after one seed are not run again.
    """
    check_seeds(most)
    level = LEVELS[most - 1]
    blocks = [[each.blocks] for each in first]
    places = list(range(1, len(first)))
    for number in range(1, most):
        comparison = _compare(first, blocks, places, level)
        if comparison.settled:
            return comparison
        if number == 1:
            places = _contenders(blocks, places, level)
        for place in (0, *places):
            blocks[place].append(again(place, number).blocks)
    return _compare(first, blocks, places, level)


def _compare(
    first: Sequence[Sample], blocks: Sequence[Sequence[Blocks]], places: Sequence[int], level: float
) -> Comparison:
    goodputs = {place: np.array(blocks[place]) for place in (0, *places)}
    best = max(places, key=lambda place: (float(goodputs[place].sum()), -first[place].run.results.ttft_s.mean))
    lower, upper = interval_of_best(np.stack([goodputs[place] - goodputs[0] for place in places], axis=2), level)
    together, split = (tuple(map(float, goodputs[place].sum(axis=1))) for place in (0, best))
    if math.isfinite(lower):
        lower = max(lower, -fmean(together))  # no cluster loses more than all
    return Comparison(first[best].run.scenario, together, split, lower, upper)


def _contenders(blocks: Sequence[Sequence[Blocks]], places: Sequence[int], level: float) -> list[int]:
    """Return the places whose clusters may be the best, by the first seed."""
    goodputs = {place: blocks[place][0] for place in places}
    best = max(places, key=lambda place: float(goodputs[place].sum()))
    return [
        place for place in places if interval_of_best((goodputs[place] - goodputs[best])[None, :, None], level)[1] >= 0
    ]


def interval_of_best(differences: Blocks, level: float) -> tuple[float, float]:
    """Return the bounds of the largest of several differences, given by seed, block and cluster.

    They hold for all clusters at once, since the largest is chosen afterwards, and miss with a chance of `level`: the
    upper one is the largest that any cluster's difference may have. With few blocks they are infinite.
    """
    _, num_blocks, _ = differences.shape
    if num_blocks < LEAST_BLOCKS:
        return -math.inf, math.inf
    means = differences.mean(axis=0)
    sums = means.sum(axis=0)
    errors = (_resamples(num_blocks) @ means - sums) * _error_factor(differences, level)
    deviation = errors.std(axis=0)
    errors = np.divide(errors, deviation, out=np.zeros_like(errors), where=deviation > 0)
    below = float(np.quantile(errors.max(axis=1), 1 - level / 2))
    above = float(np.quantile((-errors).max(axis=1), 1 - level / 2))
    best = int(sums.argmax())
    return float(sums[best] - below * deviation[best]), float((sums + above * deviation).max())


def _error_factor(differences: Blocks, level: float) -> Blocks:
    """Return, by cluster, the factor from a bootstrap's errors to those of few and dependent blocks.

    Queues outlast blocks near the load that a cluster can bear. Then longer blocks vary more than short ones, and runs
    more from seed to seed than their blocks tell: the largest of these variances counts. From LEAST_SEEDS on, the
    variance from seed to seed says directly what chance does in a run, and is enough beside that of the blocks, which
    then stands for the trace.
    """
    num_seeds, num_blocks, _ = differences.shape
    means = differences.mean(axis=0)
    centred = means - means.mean(axis=0)
    variances: list[Blocks] = []
    for joined in JOINED:
        sums = np.add.reduceat(centred, np.arange(0, num_blocks, joined), axis=0)
        variances.append((sums**2).sum(axis=0) * len(sums) / (len(sums) - 1))
    of_blocks = variances[0]
    t_of_blocks = _student(level, num_blocks - 1)
    if num_seeds > 1:
        of_seeds: Blocks = differences.sum(axis=1).var(axis=0, ddof=1) / num_seeds
        variances.append(of_seeds)
    variance: Blocks = np.max(variances, axis=0)
    if num_seeds >= LEAST_SEEDS:
        t_of_seeds = _student(level, num_seeds - 1)
        variance = np.minimum(variance, of_blocks + of_seeds * (t_of_seeds / t_of_blocks) ** 2)
    ratio: Blocks = np.divide(variance, of_blocks, out=np.ones_like(variance), where=of_blocks > 0)
    few = num_blocks / (num_blocks - 1) * (t_of_blocks / _normal(level)) ** 2
    factor: Blocks = np.sqrt(ratio * few)
    return factor


@functools.cache
def _resamples(num_blocks: int) -> Blocks:
    """Return how often each block is drawn, by resample."""
    shares = np.full(num_blocks, 1 / num_blocks)
    return np.random.default_rng(0).multinomial(num_blocks, shares, size=RESAMPLES).astype(float)


def _student(level: float, freedom: int) -> float:
    """Return Student's two-sided quantile, to 2 % from 3 degrees of freedom on, by Fisher's series."""
    z = _normal(level)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(z + sum(term / freedom ** (1 + power) for power, term in enumerate(terms)))


def _normal(level: float) -> float:
    """Return the normal distribution's two-sided quantile."""
    return NormalDist().inv_cdf(1 - level / 2)
