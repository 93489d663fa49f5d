"""Who waits for a server, and how long: M/G/c.

Exact for one server with any service times (the mean, by Pollaczek and Khinchine); for c of them Allen and Cunneen's
approximation, with Sakasegawa's for the share that waits. Above its mean a wait is taken to be exponential, which for
equal service times says a little too much. Near its limit a line says nothing reliable: a few per cent more load, and
it is twice as long. So whoever is busier than MAX_UTILISATION counts as full.
"""

import math
from dataclasses import dataclass

MAX_UTILISATION = 0.9


@dataclass(frozen=True, slots=True)
class QueueWait:
    """Before one of `servers` that take from one line."""

    utilisation: float
    share: float
    """Of those who come: who must wait."""
    mean_s: float
    """Of those."""

    @property
    def full(self) -> bool:
        return self.utilisation >= MAX_UTILISATION

    @property
    def mean_of_all_s(self) -> float:
        return self.share * self.mean_s

    def share_over(self, seconds: float) -> float:
        """Who waits for longer; all where it is full."""
        if seconds < 0 or self.full:
            return 1.0
        return self.share * math.exp(-seconds / self.mean_s) if self.mean_s else 0.0


def waiting(rate: float, servers: int, service_s: float, variation2: float) -> QueueWait:
    """`variation2`: variance of service times over the square of their mean, `service_s`."""
    utilisation = rate * service_s / servers
    if utilisation >= 1:
        return QueueWait(utilisation, 1.0, math.inf)
    share = utilisation ** (math.sqrt(2 * (servers + 1)) - 1)
    return QueueWait(utilisation, share, service_s * (1 + variation2) / 2 / (servers * (1 - utilisation)))
