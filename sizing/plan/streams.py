"""Streams that a worker can carry, and their number at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from engine.backends.sim.settings import StepWork
from sizing.gpus import Roofline
from sizing.plan.load import NORMAL, OfferedLoad

HALVINGS = 50
MAX_BATCH = 1 << 16
EXACT_MEAN = 50
MAX_GROWTH = 0.9


@dataclass(frozen=True)
class Streams:
    """Streams of one decoding worker."""

    roofline: Roofline
    load: OfferedLoad
    block_tokens: int

    def step_s(self, batch: float) -> float:
        """Return the seconds of a step with so many streams and no prompt."""
        low = math.floor(batch)
        at_low, at_high = self._whole_s(low), self._whole_s(low + 1)
        return at_low + (batch - low) * (at_high - at_low)

    @cached_property
    def pool_tokens(self) -> int:
        """Tokens of streams of mean length that its KV pool holds.

        Raises BadSetup.
        """
        return self.roofline.num_blocks(self.block_tokens, self.load.context) * self.block_tokens

    @property
    def pool_bytes(self) -> float:
        """Bytes of its KV pool, one copy."""
        return self.pool_tokens * self.roofline.model.mean_token_bytes(self.load.context)

    @cached_property
    def fit(self) -> float:
        """Mean number of sequences that fit the pool.

        Raises BadSetup.
        """
        return self.pool_tokens / (self.load.context + self.block_tokens / 2)  # half of the last block is empty

    def swing(self, batch: float) -> float:
        """Return the variance of the streams' KV, relative to that of as many equal, independent streams.

        Unequal streams multiply it by 1 + their variation squared. Where a larger batch makes steps longer, streams
        stay longer, which makes it larger still: a population that n leave at the rate n / T(n) has a variance of the
        mean over 1 - n T'(n) / T(n).
        """
        unequal = 1 + (self.load.variation * self.load.prompt / self.load.context) ** 2
        whole = max(1.0, batch)
        growth = whole * (self.step_s(whole + 1) - self.step_s(whole)) / self.step_s(whole)
        return unequal / (1 - min(growth, MAX_GROWTH))

    def kept_memory(self, workers: int, held: float, batch: float) -> float:
        """Return the share of requests that find memory at once beside those that `held` some, on all workers together.

        A sequence is whole on one worker; one that no worker could hold finds none.
        """
        fitting = self.load.prompts.share_of(lambda prompt: float(self._fits(prompt + self.load.output)))
        return fitting * share_within(workers * math.floor(self.fit), held, self.swing(batch))

    def _fits(self, tokens: float) -> bool:
        """Return whether a sequence alone fits the pool."""
        model = self.roofline.model
        return tokens <= self.pool_tokens if model.is_uniform else model.kv_bytes(tokens) <= self.pool_bytes

    def largest(self, itl_s: float) -> float:
        """Return the number of streams whose step takes no longer than `itl_s`; 0: a single one takes longer."""
        return 0.0 if self.step_s(1) > itl_s else crossing(lambda batch: self.step_s(batch) - itl_s, 1.0, MAX_BATCH)

    def _whole_s(self, batch: int) -> float:
        return self.roofline.seconds_of(StepWork(streams=batch, context_tokens=round(batch * self.load.context)))


def crossing(rising: Callable[[float], float], low: float, high: float) -> float:
    """Return where an increasing function crosses 0, or `high` where it stays below."""
    if rising(high) <= 0:
        return high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return low


def poisson_share(most: float, mean: float) -> float:
    """Return P(N <= most) for Poisson N, exact for small means, else by the normal distribution."""
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
    """Return the share of requests that, with a mean of `mean` others, find at most `limit`, themselves included.

    The variance is `swing` times that of Poisson's distribution: as of fewer, larger ones.
    """
    return poisson_share((limit - 1) / swing, mean / swing)
