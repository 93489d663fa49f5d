"""Quality of predictions: the logarithm of predicted over actual, as running quantiles.

Pure.
"""

import math
from collections.abc import Sequence

BINS_PER_DOUBLING = 8
DOUBLINGS = 10
"""Factor, in powers of two, at which a wrong prediction is capped."""
MEMORY = 4096
"""Number of predictions at which all counts are halved, so that quantiles follow the last few thousand."""


class LogRatios:
    """Histogram of the logarithm of predicted over actual; a quantile is right within half a bin, 4.5 %."""

    def __init__(self) -> None:
        self._counts = [0.0] * (2 * DOUBLINGS * BINS_PER_DOUBLING + 1)
        self._total = 0.0
        self.num_seen = 0

    def add(self, predicted: float, actual: float) -> None:
        """Add a prediction; both values are above 0."""
        doublings = max(-DOUBLINGS, min(DOUBLINGS, math.log2(predicted / actual)))
        self._counts[round((doublings + DOUBLINGS) * BINS_PER_DOUBLING)] += 1
        self._total += 1
        self.num_seen += 1
        if self._total >= MEMORY:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Return predicted over actual at these shares, in [0, 1]; nan before the first prediction."""
        return [self._quantile(share) for share in shares]

    def _quantile(self, share: float) -> float:
        if not self._total:
            return math.nan
        reached, last = 0.0, 0
        for number, count in enumerate(self._counts):
            if count:
                reached, last = reached + count, number
                if reached >= share * self._total:
                    break
        return float(2 ** (last / BINS_PER_DOUBLING - DOUBLINGS))
