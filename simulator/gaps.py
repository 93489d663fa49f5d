"""Times between tokens, millions of them, in bounded memory: a histogram whose bins are 1 % wide."""

import math
from collections import Counter

BIN = math.log(1.01)
LEAST_S = 1e-7


class Gaps:
    """Adds up in whole numbers, so that the order in which gaps come makes no difference."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total_ns = 0
        self.count = 0

    def add(self, gap_s: float, count: int = 1) -> None:
        self._counts[math.floor(math.log(max(gap_s, LEAST_S)) / BIN)] += count
        self._total_ns += round(gap_s * 1e9) * count
        self.count += count

    @property
    def mean_s(self) -> float:
        """nan where there were none."""
        return self._total_ns / self.count / 1e9 if self.count else math.nan

    def quantile_s(self, share: float) -> float:
        """Right within 1 %; nan where there were none."""
        reached = 0
        for number in sorted(self._counts):
            reached += self._counts[number]
            if reached >= share * self.count:
                return math.exp((number + 0.5) * BIN)
        return math.nan
