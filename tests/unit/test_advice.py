"""Advice: differences told from noise, how many seeds that takes, and clusters of which the better one is known."""

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from sizing.comparison.advice import BLOCKS, LEAST_BLOCKS, LEVELS, Comparison, Sample, interval_of_best, sample, settle
from sizing.comparison.replay import Scenario, Setup, replay
from sizing.comparison.report import advice, as_json, verdict
from sizing.gpus import gpu_named
from sizing.models.model_shape import open_shape
from sizing.plan.load import OfferedLoad
from sizing.plan.search import requests_of
from support.virtual_cluster import random_requests
from workloads.request import BadSetup, TraceRequest
from workloads.results import Slo

SETUP = Setup(open_shape(None), gpu_named("H100"), gpus=4)
SPLIT = Scenario("conditional", 1, 3)
TRIALS = 400


# ------------------------------------------------------------------ intervals


@pytest.mark.parametrize("num_blocks", [LEAST_BLOCKS, BLOCKS])
@pytest.mark.parametrize(("num_seeds", "num_splits"), [(1, 1), (1, 6), (3, 1)])
def test_equal_clusters_rarely_differ(num_blocks: int, num_seeds: int, num_splits: int) -> None:
    """The best of several, too, although it is chosen by the same noise."""
    rng = np.random.default_rng(num_splits)
    shape = (num_seeds, num_blocks, num_splits)
    found = [interval_of_best(rng.normal(size=shape), LEVELS[0]) for _ in range(TRIALS)]
    assert sum(lower > 0 for lower, _ in found) <= 0.04 * TRIALS
    assert sum(upper < 0 for _, upper in found) <= 0.04 * TRIALS


@pytest.mark.parametrize("num_seeds", [1, 4])
def test_equal_clusters_whose_queues_outlast_a_block_rarely_differ(num_seeds: int) -> None:
    """Neighbouring blocks are alike (an autoregression), and with several seeds each run has a luck of its own."""
    rng, alike = np.random.default_rng(0), 0.3
    differ = 0
    for _ in range(TRIALS):
        blocks = rng.normal(size=(num_seeds, BLOCKS, 1))
        for place in range(1, BLOCKS):
            blocks[:, place] = alike * blocks[:, place - 1] + math.sqrt(1 - alike**2) * blocks[:, place]
        luck = rng.normal(size=(num_seeds, 1, 1)) if num_seeds > 1 else 0.0
        lower, upper = interval_of_best(blocks + luck, LEVELS[0])
        differ += not lower <= 0 <= upper
    assert differ <= 0.13 * TRIALS  # with blocks alone 0.15 and 0.56


def test_intervals_hold_the_difference_and_are_not_much_wider_than_they_must() -> None:
    rng = np.random.default_rng(0)
    found = [interval_of_best(rng.normal(1.0, 1.0, size=(1, BLOCKS, 1)), LEVELS[0]) for _ in range(TRIALS)]
    assert sum(lower <= BLOCKS <= upper for lower, upper in found) >= 0.95 * TRIALS
    width = float(np.mean([upper - lower for lower, upper in found]))
    exact = 2 * 2.093 * math.sqrt(BLOCKS)  # Student's t for 19 degrees of freedom
    assert exact < width < 1.3 * exact


def test_a_noisy_cluster_widens_the_upper_bound_only() -> None:
    """The best is sure to be worse, but another one may be better."""
    rng = np.random.default_rng(0)
    calm, noisy = rng.normal(-1.0, 0.1, size=(1, BLOCKS, 1)), rng.normal(-2.0, 10.0, size=(1, BLOCKS, 1))
    alone, both = (interval_of_best(each, LEVELS[0]) for each in (calm, np.concatenate((calm, noisy), axis=2)))
    assert alone[1] < 0 < both[1]
    assert both[0] == pytest.approx(alone[0], abs=0.5)


def test_a_few_requests_tell_nothing() -> None:
    assert interval_of_best(np.ones((1, LEAST_BLOCKS - 1, 1)), LEVELS[0]) == (-math.inf, math.inf)
    assert interval_of_best(np.ones((1, LEAST_BLOCKS, 1)), LEVELS[0]) == (LEAST_BLOCKS, LEAST_BLOCKS)


# ------------------------------------------------------------------ verdicts


def compared(base: float, other: float, lower: float, upper: float) -> Comparison:
    return Comparison(SPLIT, (base,), (other,), lower, upper)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (compared(1.0, 1.5, 0.1, 0.9), "disaggregate"),
        (compared(1.0, 1.5, -0.1, 1.1), "even"),  # the interval includes no difference
        (compared(1.0, 1.02, 0.01, 0.03), "even"),  # it does not matter
        (compared(1.0, 0.5, -0.9, -0.1), "aggregate"),
        (compared(1.0, 0.98, -0.03, -0.01), "even"),
        (compared(0.0, 1.0, 0.5, 1.5), "disaggregate"),
        (compared(1.0, 0.0, -1.5, -0.5), "aggregate"),
        (compared(1.0, 1.5, -math.inf, math.inf), "even"),
    ],
)
def test_verdicts(found: Comparison, said: str) -> None:
    assert found.verdict == said


def test_advice_in_words() -> None:
    runs = [
        replay(SETUP, scenario, random_requests(5, 10, rate=20.0)) for scenario in (Scenario("aggregated", 0, 4), SPLIT)
    ]

    def said(*figures: float) -> str:
        return advice(runs, compared(*figures))

    better = said(1.0, 1.5, 0.4, 0.6)
    assert better == (
        "Disaggregate: conditional 1P:3D gives 1.5 requests/s per GPU within the SLO, +50.0% (+40.0% to +60.0%: 95 %"
        " interval, 1 seed) beside aggregated"
    )
    assert said(1.0, 0.5, -0.6, -0.4).startswith("Do not disaggregate: aggregated gives 1 requests/s per GPU")
    assert said(1.0, 1.01, 0.0, 0.02).startswith("Even, so do not disaggregate: aggregated has fewer parts")
    assert "+1.0% (+0.0% to +2.0%" in said(1.0, 1.01, 0.0, 0.02)
    assert said(1.0, 1.1, -0.1, 0.3).startswith("Even as far as this trace tells, so do not disaggregate")
    assert "no interval: too few requests" in said(1.0, 1.1, -math.inf, math.inf)
    assert "more by 0.5 to 1.5" in said(0.0, 1.0, 0.5, 1.5)
    assert said(0.0, 0.0, 0.0, 0.0).startswith("Nothing keeps the SLO")
    assert advice(runs[1:]).startswith("Best: conditional")
    assert (verdict(None), verdict(compared(0.0, 0.0, 0.0, 0.0))) == (None, None)
    told = as_json(runs, SETUP, "t", compared(1.0, 1.5, -math.inf, math.inf))
    assert (told["verdict"], told["difference"]["interval"]) == ("even", [None, None])


# ------------------------------------------------------------------ seeds


class Drawn:
    """Clusters whose goodput is drawn: a mean, and noise of each seed."""

    def __init__(self, means: Iterable[float], noise: float) -> None:
        self._means, self._noise = list(means), noise
        self._run = replay(SETUP, SPLIT, [TraceRequest(0, 0.0, 100, 2)])
        self.asked: list[tuple[int, int]] = []

    def again(self, place: int, number: int) -> Sample:
        self.asked.append((place, number))
        rng = np.random.default_rng((place, number))
        return Sample(self._run, self._means[place] + self._noise * rng.normal(size=BLOCKS))

    def settle(self, most: int) -> Comparison:
        first = [self.again(place, 0) for place in range(len(self._means))]
        self.asked.clear()
        return settle(first, most, self.again)


def test_a_clear_difference_takes_one_seed() -> None:
    for means, said in (((1.0, 1.5), "disaggregate"), ((1.0, 0.5), "aggregate"), ((1.0, 1.0), "even")):
        drawn = Drawn(means, noise=0.01)
        found = drawn.settle(4)
        assert (found.verdict, found.settled, drawn.asked) == (said, True, [])


def test_seeds_are_added_until_the_difference_is_told_from_noise() -> None:
    drawn = Drawn((1.0, 1.15), noise=0.4)
    assert drawn.settle(1).verdict == "even"
    found = drawn.settle(10)
    assert found.verdict == "disaggregate"
    assert 1 < len(found.together_by_seed) < 10
    assert drawn.asked == [(place, number) for number in range(1, len(found.together_by_seed)) for place in (0, 1)]


def test_seeds_are_bounded() -> None:
    drawn = Drawn((1.0, 1.0), noise=0.5)
    found = drawn.settle(3)
    assert (found.verdict, found.settled, len(found.split_by_seed)) == ("even", False, 3)
    for most in (0, len(LEVELS) + 1):
        with pytest.raises(BadSetup, match=f"repeat: must be 1 to 10, not {most}"):
            drawn.settle(most)


def test_clusters_that_cannot_be_the_best_are_not_run_again() -> None:
    drawn = Drawn((1.0, 0.2, 1.05, 0.3), noise=0.2)
    found = drawn.settle(4)
    assert {place for place, _ in drawn.asked} == {0, 2}
    assert found.split_by_seed[0] == pytest.approx(1.05 * BLOCKS, rel=0.1)


# ------------------------------------------------------------------ real runs


def test_a_samples_blocks_are_its_goodput() -> None:
    trace = random_requests(5, 50, rate=50.0)
    strict = replace(SETUP, slo=Slo(0.03, 0.05))
    made = sample(strict, Scenario("aggregated", 0, 4), trace)
    assert len(made.blocks) == BLOCKS
    assert made.blocks.sum() == pytest.approx(made.run.results.goodput_per_gpu)
    assert 0 < made.run.results.kept < 50
    nothing = sample(replace(SETUP, slo=Slo(1e-6, 1e-6)), Scenario("aggregated", 0, 4), trace[:5])
    assert nothing.blocks.tolist() == 5 * [0.0]


def in_a_span(load: OfferedLoad, count: int, seed: int) -> list[TraceRequest]:
    """Other requests with each seed, all as fast in the mean."""
    requests = list(requests_of(load, count, seed))
    factor = count / load.rate / requests[-1].arrival_s
    return [replace(each, arrival_s=each.arrival_s * factor) for each in requests]


@pytest.mark.parametrize(
    ("slo", "load", "together", "split", "said"),
    [
        (Slo(1.0, 0.012), OfferedLoad(14, 3000, 200), 4, (2, 2), "disaggregate"),
        (Slo(1.0, 0.05), OfferedLoad(1, 1000, 200), 1, (1, 1), "aggregate"),
    ],
)
def test_a_cluster_that_is_clearly_better_is_advised(
    slo: Slo, load: OfferedLoad, together: int, split: tuple[int, int], said: str
) -> None:
    """Two of docs/published-results.md: long prompts with a strict ITL, and low load."""
    setup = replace(SETUP, slo=slo)
    scenarios = (Scenario("aggregated", 0, together), Scenario("disaggregated", *split))

    def again(place: int, number: int) -> Sample:
        return sample(setup, scenarios[place], in_a_span(load, 300, number))

    assert settle([again(0, 0), again(1, 0)], 4, again).verdict == said


def test_two_seeds_of_one_cluster_are_even() -> None:
    """By other requests near the load that it bears."""
    setup, load = replace(SETUP, slo=Slo(1.0, 0.012)), OfferedLoad(10, 3000, 200)

    def again(place: int, number: int) -> Sample:
        return sample(setup, Scenario("aggregated", 0, 4), in_a_span(load, 200, 10 * place + number))

    found = settle([again(0, 0), again(1, 0)], 2, again)
    assert found.verdict == "even"
    assert found.change, "their goodput differs"
