"""Lengths of outputs, learned from receipts for each tenant and task.

Pure, and bounded in memory.

The estimate is a quantile, not the mean: an output that outgrows its reservation may preempt others. An output that
ended at max_tokens says only that it would have been at least that long. So the quantile is the Kaplan-Meier estimate:
of all outputs that reached a length, which part went on.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from router.placement.rates import Floats

OutputKey = tuple[str, str]
"""Tenant and task of a request."""
SHARE = 0.8
"""Share of the outputs that are at most as long as the estimate."""
BINS_PER_DOUBLING = 4
"""Resolution: an estimate is rounded up to the end of its bin, by 19 % at most."""
DOUBLINGS = 21
"""Longest output that is told from longer ones, as a power of two."""
NUM_BINS = DOUBLINGS * BINS_PER_DOUBLING + 1
EVERY = 8
"""Number of outputs after which an estimate is made anew; the first is made of as many."""
MEMORY = 256
"""Number of outputs at which all counts are halved, so that the estimate follows the last few hundred."""
MAX_KEYS = 4096
"""Keys that are remembered, those used last; each has 1.5 KiB."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated length of an output."""

    num_tokens: int
    num_seen: int
    """Outputs from which it was learned."""


@dataclass(slots=True, eq=False)
class _Lengths:
    ended: Floats
    """Outputs that ended by themselves, by bin."""
    cut: Floats
    """Outputs that ended at their max_tokens, by bin."""
    weight: float = 0.0
    """Sum of both."""
    num_seen: int = 0
    estimate: Estimate | None = None
    """The estimate; None before the first."""


class OutputLengths:
    """Output lengths of one model."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._lengths: OrderedDict[OutputKey, _Lengths] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lengths)

    def observe(self, key: OutputKey, num_tokens: int, is_cut: bool) -> None:
        """Learn from an output of at least one token; `is_cut`: it ended at its max_tokens."""
        lengths = self._lengths.get(key)
        if lengths is None:
            lengths = self._lengths[key] = _Lengths(np.zeros(NUM_BINS), np.zeros(NUM_BINS))
            if len(self._lengths) > self._max_keys:
                self._lengths.popitem(last=False)
        self._lengths.move_to_end(key)
        (lengths.cut if is_cut else lengths.ended)[_bin_of(num_tokens)] += 1
        lengths.num_seen += 1
        lengths.weight += 1
        if lengths.num_seen % EVERY == 0:
            lengths.estimate = Estimate(_quantile(lengths.ended, lengths.cut), lengths.num_seen)
        if lengths.weight >= MEMORY:
            lengths.ended /= 2
            lengths.cut /= 2
            lengths.weight /= 2

    def estimate(self, key: OutputKey) -> Estimate | None:
        """Return the estimate for a key; None before EVERY outputs."""
        lengths = self._lengths.get(key)
        return None if lengths is None else lengths.estimate


def _bin_of(num_tokens: int) -> int:
    return min(NUM_BINS - 1, math.ceil(math.log2(num_tokens) * BINS_PER_DOUBLING))


def _quantile(ended: Floats, cut: Floats) -> int:
    """Return the end of the first bin by which SHARE of the outputs have ended.

    Where too many were cut to know it: the end of the longest output's bin.
    """
    reached = np.cumsum((ended + cut)[::-1])[::-1]
    gone_on = np.cumprod(1 - ended / np.maximum(reached, 1e-9))
    enough = np.flatnonzero(gone_on <= 1 - SHARE + 1e-9)
    last = int(enough[0]) if len(enough) else int(np.flatnonzero(reached)[-1])
    return math.ceil(2 ** (last / BINS_PER_DOUBLING))
