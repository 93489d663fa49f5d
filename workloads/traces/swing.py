"""Trace whose rate varies as over a day: the same requests in the same order, at other times."""

import dataclasses
import math
from collections.abc import Iterable, Iterator

from workloads.errors import BadSetup
from workloads.request import TraceRequest


class RateSwing:
    """Trace whose request due at u is moved to t.

        u = t - c P / 2π sin(2π t / P),    c = (factor - 1) / (factor + 1).

    A trace of an even rate r gets the rate r (1 - c cos(2π t / P)): it begins at its lowest rate, r (1 - c), reaches
    its highest, `factor` times as much, half a period later, and averages r over every whole period. Bursts of the
    trace stay.
    """

    def __init__(self, trace: Iterable[TraceRequest], factor: float, period_s: float) -> None:
        """Wrap `trace`.

        Raises BadSetup.
        """
        if not 1 <= factor < math.inf:
            raise BadSetup("swing", f"{factor} is not at least 1")
        if not 0 < period_s < math.inf:
            raise BadSetup("period", f"{period_s} s is not above 0")
        self._trace = trace
        self._part = (factor - 1) / (factor + 1)
        self._period_s = period_s

    def __iter__(self) -> Iterator[TraceRequest]:
        for request in self._trace:
            yield dataclasses.replace(request, arrival_s=self.at(request.arrival_s))

    def at(self, even_s: float) -> float:
        """Return the time t of a request due at `even_s`; t is within c P / 2π of it."""
        reach = self._part * self._period_s / (2 * math.pi)
        low, high = max(0.0, even_s - reach), even_s + reach
        for _ in range(60):
            middle = (low + high) / 2
            if middle - reach * math.sin(2 * math.pi * middle / self._period_s) < even_s:
                low = middle
            else:
                high = middle
        return high
