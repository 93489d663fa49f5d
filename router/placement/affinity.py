"""The affinity hint: requests of one session prefer the workers that served its last request.

Pure, and bounded in memory.

The index of cached blocks decides where a prompt is cheap. The hint decides where the index does not know yet: the last
answer's blocks are on their way as cache events, or several workers hold equally much. It loses to load: it reduces a
candidate's cost by at most `SHARE` of it, and by at most `MOST_S`.
"""

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from router.placement.rates import Floats

SHARE = 0.05
"""Largest reduction as a share of the cost: less than the usual error of a prediction."""
MOST_S = 0.01
"""Largest reduction in seconds: no client waits longer for the sake of its session, however long its prompt is."""
PART = 0.5
"""Part of the reduction for the decode worker, and for a lender that computes."""
MAX_SESSIONS = 16_384
"""Sessions that one model remembers, about 300 bytes each."""

SessionKey = tuple[str, str]
"""Tenant, and a digest of the session's name; empty texts: no session."""
NO_SESSION: SessionKey = ("", "")


@dataclass(frozen=True, slots=True)
class Served:
    """Workers that served a session's last request."""

    decode_id: str
    decode_incarnation: bytes
    lender_id: str = ""
    """Lender that computed; empty: none did."""
    lender_incarnation: bytes = b""


def session_of(tenant: str, session_id: str, prompt_cache_key: str) -> SessionKey:
    """Return the key of a request's session, whose more precise name is `session_id`."""
    name = session_id or prompt_cache_key
    return (tenant, blake2b(name.encode(), digest_size=16).hexdigest()) if name else NO_SESSION


def reduction_s(cost_s: Floats | float) -> Floats:
    """Return the part of the reduction that one matching worker is worth, for each cost."""
    reduction: Floats = np.minimum(cost_s * SHARE, MOST_S) * PART
    return reduction


class Affinities:
    """Workers that served each session last.

    When full, the tenant with most sessions loses its oldest one. So a tenant keeps as many as an equal share for each
    tenant allows, whatever the others do.
    """

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._of_tenant: dict[str, OrderedDict[str, Served]] = {}
        """Sessions of each tenant, the one used longest ago first."""
        self._by_size: dict[int, OrderedDict[str, None]] = {}
        """Tenants by number of sessions."""
        self._largest = 0
        self._num_sessions = 0

    def __len__(self) -> int:
        return self._num_sessions

    def served(self, session: SessionKey, by: Served) -> None:
        """Record which workers served a request."""
        if session == NO_SESSION:
            return
        tenant, name = session
        sessions = self._of_tenant.setdefault(tenant, OrderedDict())
        is_new = name not in sessions
        sessions[name] = by
        sessions.move_to_end(name)
        if not is_new:
            return
        self._num_sessions += 1
        self._resized(tenant, len(sessions) - 1)
        if self._num_sessions > self._max_sessions:
            loser = next(iter(self._by_size[self._largest]))
            self._of_tenant[loser].popitem(last=False)
            self._num_sessions -= 1
            self._resized(loser, self._largest)

    def last(self, session: SessionKey) -> Served | None:
        """Return the workers that served the session's last request; None where unknown."""
        if session == NO_SESSION:
            return None
        tenant, name = session
        sessions = self._of_tenant.get(tenant)
        return None if sessions is None else sessions.get(name)

    def check_integrity(self) -> None:
        """Check all records.

        Raises AssertionError when they disagree.
        """
        sizes = {tenant: len(sessions) for tenant, sessions in self._of_tenant.items()}
        assert all(sizes.values()), "a tenant without sessions is kept"
        assert self._num_sessions == sum(sizes.values()) <= self._max_sessions
        assert {tenant: size for size, tenants in self._by_size.items() for tenant in tenants} == sizes
        assert all(self._by_size.values()), "an empty size is kept"
        assert self._largest == max(sizes.values(), default=0)

    def _resized(self, tenant: str, before: int) -> None:
        """Record that a tenant has one session more or less than `before`."""
        if before:
            tenants = self._by_size[before]
            del tenants[tenant]
            if not tenants:
                del self._by_size[before]
        if after := len(self._of_tenant[tenant]):
            self._by_size.setdefault(after, OrderedDict())[tenant] = None
        else:
            del self._of_tenant[tenant]
        self._largest = max(self._largest, after)
        if self._largest not in self._by_size:
            self._largest -= 1  # by one at most, since sizes change by one
