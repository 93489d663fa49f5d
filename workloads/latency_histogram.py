"""Histogram of millions of inter-token latencies in bounded memory, with bins 1 % wide."""

import math

BINS = 1 / math.log(1.01)
"""Bins per factor of e."""
LEAST_S = 1e-7
OFFSET = 1 + int(-math.log(LEAST_S) * BINS)


class LatencyHistogram:
    """Histogram of integer counts, so that the order of additions does not matter."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total_ns = 0
        self.count = 0

    def add(self, gap_s: float, count: int = 1) -> None:
        bin_number = int(math.log(gap_s) * BINS + OFFSET) if gap_s > LEAST_S else 0
        self._counts[bin_number] = self._counts.get(bin_number, 0) + count
        self._total_ns += round(gap_s * 1e9) * count
        self.count += count

    @property
    def mean_s(self) -> float:
        """Mean in seconds; nan without values."""
        return self._total_ns / self.count / 1e9 if self.count else math.nan

    def quantile_s(self, share: float) -> float:
        """Return a quantile, right within 1 %; nan without values."""
        reached = 0
        for number in sorted(self._counts):
            reached += self._counts[number]
            if reached >= share * self.count:
                return math.exp((number - OFFSET + 0.5) / BINS)
        return math.nan
