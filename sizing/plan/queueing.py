"""Waits for servers of one queue: M/G/c.

Exact for one server with any service times (the mean, by Pollaczek and Khinchine). For c servers Allen and Cunneen's
approximation, with Sakasegawa's for the share that waits. Above its mean a wait is taken as exponential, slightly too
much for equal service times. Near its limit a queue is unpredictable: a few per cent more load double it. So more than
MAX_UTILISATION counts as full.
"""

import math
from dataclasses import dataclass

MAX_UTILISATION = 0.9


@dataclass(frozen=True, slots=True)
class QueueWait:
    """Wait before one of `servers` with a common queue."""

    utilisation: float
    share: float
    """Share of arrivals that must wait."""
    mean_s: float
    """Mean wait of those."""

    @property
    def full(self) -> bool:
        return self.utilisation >= MAX_UTILISATION

    @property
    def mean_of_all_s(self) -> float:
        return self.share * self.mean_s

    def share_over(self, seconds: float) -> float:
        """Return the share that waits for longer; 1 where it is full."""
        if seconds < 0 or self.full:
            return 1.0
        return self.share * math.exp(-seconds / self.mean_s) if self.mean_s else 0.0


def waiting(rate: float, servers: int, service_s: float, variation2: float) -> QueueWait:
    """Return the wait.

    `variation2`: variance of service times over the square of their mean, `service_s`.
    """
    utilisation = rate * service_s / servers
    if utilisation >= 1:
        return QueueWait(utilisation, 1.0, math.inf)
    share = utilisation ** (math.sqrt(2 * (servers + 1)) - 1)
    return QueueWait(utilisation, share, service_s * (1 + variation2) / 2 / (servers * (1 - utilisation)))
