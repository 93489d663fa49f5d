"""Retries of a line. Pure.

A line is tried again as long as its batch lasts, where another try may succeed.
"""

import math

from cluster.errors import Overloaded, ServiceError

FIRST_WAIT_S = 0.25
MAX_WAIT_S = 30.0
"""Longest wait without advice, in seconds."""
MAX_ADVISED_S = 600.0
"""Longest wait with advice, in seconds: a quota's window may last a day, but a limit may be raised before."""


def wait_s(error: ServiceError, num_tries: int, luck: float) -> float:
    """Return the seconds until the next try after so many; `luck` in [0, 1] spreads lines that failed together."""
    own = min(MAX_WAIT_S, FIRST_WAIT_S * math.ldexp(1.0, min(num_tries - 1, 20)))
    advised = error.retry_after_s if isinstance(error, Overloaded) else None
    return max(own, min(MAX_ADVISED_S, advised or 0.0)) * (1.0 + luck / 2)
