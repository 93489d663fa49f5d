"""How many streams a worker carries, and how many there are at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from engine.backends.sim.timing import StepWork
from simulator.gpus import Roofline
from simulator.plan.load import NORMAL, Load

HALVINGS = 50
MAX_BATCH = 1 << 16
EXACT_MEAN = 50
MAX_GROWTH = 0.9


@dataclass(frozen=True)
class Streams:
    """Of one worker that decodes."""

    roofline: Roofline
    load: Load
    block_tokens: int

    def step_s(self, batch: float) -> float:
        """Of so many streams and nothing else."""
        low = math.floor(batch)
        at_low, at_high = self._whole_s(low), self._whole_s(low + 1)
        return at_low + (batch - low) * (at_high - at_low)

    @cached_property
    def pool_tokens(self) -> int:
        """Its KV pool holds. Raises BadSetup."""
        return self.roofline.num_blocks(self.block_tokens) * self.block_tokens

    @cached_property
    def fit(self) -> float:
        """Sequences in it, the mean. Raises BadSetup."""
        return self.pool_tokens / (self.load.context + self.block_tokens / 2)  # half of the last block is empty

    def swing(self, batch: float) -> float:
        """Variance of the KV that streams have, in units of what so many equal streams would have by chance, whose
        variance is their number.

        Streams are not equal: that multiplies it by 1 + their variation squared. And where a larger batch makes steps
        longer, streams stay longer, which makes it larger still: of a crowd that n leave at the rate n / T(n), the
        variance is the mean over 1 - n T'(n) / T(n)."""
        unequal = 1 + (self.load.variation * self.load.prompt / self.load.context) ** 2
        whole = max(1.0, batch)
        growth = whole * (self.step_s(whole + 1) - self.step_s(whole)) / self.step_s(whole)
        return unequal / (1 - min(growth, MAX_GROWTH))

    def kept_memory(self, workers: int, held: float, batch: float) -> float:
        """Of requests: who finds room at once where so many hold some, on all workers together. A sequence is whole on
        one worker; one that no worker could hold finds none."""
        fitting = self.load.prompts.share_of(lambda prompt: float(prompt + self.load.output <= self.pool_tokens))
        return fitting * share_within(workers * math.floor(self.fit), held, self.swing(batch))

    def largest(self, itl_s: float) -> float:
        """Streams whose step takes no longer; 0: a single one does."""
        return 0.0 if self.step_s(1) > itl_s else crossing(lambda batch: self.step_s(batch) - itl_s, 1.0, MAX_BATCH)

    def _whole_s(self, batch: int) -> float:
        return self.roofline.seconds_of(StepWork(streams=batch, context_tokens=round(batch * self.load.context)))


def crossing(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that rises goes through 0; `high` where it stays below."""
    if rising(high) <= 0:
        return high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return low


def poisson_share(most: float, mean: float) -> float:
    """P(N <= most) for N that is Poisson: to the digit for small means, else by the normal distribution."""
    if most < 0:
        return 0.0
    if mean > EXACT_MEAN:
        return NORMAL.cdf((math.floor(most) + 0.5 - mean) / math.sqrt(mean))
    term = total = math.exp(-mean)
    for count in range(1, min(math.floor(most), 4 * EXACT_MEAN) + 1):
        term *= mean / count
        total += term
    return min(1.0, total)


def share_within(limit: float, mean: float, swing: float = 1.0) -> float:
    """Of requests that find so many others, by `mean`, that with them there are no more than `limit`. The variance is
    `swing` times that of Poisson's distribution: as of fewer, larger ones."""
    return poisson_share((limit - 1) / swing, mean / swing)
