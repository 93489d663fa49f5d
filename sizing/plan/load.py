"""The load of a cluster: Poisson arrivals and lognormal lengths."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from workloads.request import BadSetup
from workloads.traces.columns import MAX_TOKENS

BODY = tuple(place / 40 for place in range(1, 39))
"""Shares at which lengths are cut into parts."""
TAIL = tuple(2.0 + place / 4 for place in range(25))
"""Further cuts, at standard deviations of the logarithm, since the few longest lengths dominate squares."""
MAX_RATE = 1e6
MAX_VARIATION = 3.0
NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """Lognormal lengths in tokens, as those of prompts and outputs mostly are."""

    mean: float
    variation: float
    """Standard deviation over mean; 0: all are equal."""

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm."""
        return math.sqrt(math.log1p(self.variation**2))

    @property
    def square(self) -> float:
        """Mean of squares."""
        return self.mean**2 * (1 + self.variation**2)

    @cached_property
    def parts(self) -> tuple[tuple[float, float], ...]:
        """Share of each part of the lengths, and its mean, in rising order; none is below 1."""
        if not self.variation:
            return ((1.0, self.mean),)
        cuts = [-math.inf, *(NORMAL.inv_cdf(share) for share in BODY), *TAIL, math.inf]
        parts = []
        for low, high in itertools.pairwise(cuts):
            share, of_sum = _between(low, high), _between(low - self.sigma, high - self.sigma)
            parts.append((share, max(1.0, self.mean * of_sum / share)))
        return tuple(parts)

    def quantile(self, share: float) -> float:
        """Return the length that a share of all lengths does not exceed."""
        return max(1.0, self.mean * math.exp(self.sigma * NORMAL.inv_cdf(share) - self.sigma**2 / 2))

    def mean_of(self, value_of: Callable[[float], float]) -> float:
        return sum(share * value_of(length) for share, length in self.parts)

    def share_of(self, part_of: Callable[[float], float]) -> float:
        """Return the mean of a function with values from 0 to 1."""
        return min(1.0, self.mean_of(part_of))


@dataclass(frozen=True)
class OfferedLoad:
    """Poisson arrivals with independent lengths of prompts and outputs.

    Raises BadSetup.
    """

    rate: float
    """Requests per second."""
    prompt: float
    """Mean tokens of a prompt."""
    output: float
    """Mean tokens of an output."""
    hit_rate: float = 0.0
    """Share of a prompt's tokens that are cached where it is computed."""
    variation: float = 0.5
    """Variation of both lengths."""

    def __post_init__(self) -> None:
        bounds = (
            ("rate", 0.0, MAX_RATE, False),
            ("prompt", 1.0, MAX_TOKENS, True),
            ("output", 1.0, MAX_TOKENS, True),
            ("hit_rate", 0.0, 1.0, True),
            ("variation", 0.0, MAX_VARIATION, True),
        )
        for name, least, most, least_too in bounds:
            value = getattr(self, name)
            if not (least <= value <= most) or (value == least and not least_too):
                raise BadSetup(name, f"{value:g} is not {'from' if least_too else 'above'} {least:g} to {most:g}")

    @cached_property
    def prompts(self) -> Lengths:
        return Lengths(self.prompt, self.variation)

    @cached_property
    def outputs(self) -> Lengths:
        return Lengths(self.output, self.variation)

    @property
    def gaps(self) -> float:
        """Mean number of gaps between the tokens of an output."""
        return self.outputs.mean_of(lambda tokens: tokens - 1)

    @property
    def context(self) -> float:
        """Mean tokens of a stream at any moment: its prompt, and the output so far.

        Long outputs are met more often.
        """
        return self.prompt + self.outputs.square / (2 * self.output)


def _between(low: float, high: float) -> float:
    """Return P(low < z <= high) of a standard normal z, exact in its upper tail too."""
    return (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2))) / 2
