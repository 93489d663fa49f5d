"""Speeds that placement reads, and lines learned online.

Every duration here is a line: fixed seconds, and seconds per token, byte or stream.

The affinity hint: requests of one session prefer the workers that served its last request.

Pure, and bounded in memory.

The index of cached blocks decides where a prompt is cheap. The hint decides where the index does not know yet: the last
answer's blocks are on their way as cache events, or several workers hold equally much. It loses to load: it reduces a
candidate's cost by at most `SHARE` of it, and by at most `MOST_S`.

Pure.
"""

import math
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MAX_SURPRISE = math.log(4)
"""Cap on a measurement's distance from the prediction, as a logarithm of a factor."""
DOUBT = 0.25
"""Variance of a prior in the logarithm, in units of a measurement's: the prior weighs as much as four."""
DRIFT = 0.0025
"""Growth of a variance with each measurement, since machines change; the weight of a new one stays above a twentieth.
"""
MAX_FACTOR = math.exp(MAX_SURPRISE * math.sqrt(DOUBT) / 2)
"""Largest factor by which one measurement moves a value."""
LEAST, MOST = 1e-12, 1e9
"""Smallest and largest duration, in seconds."""


@dataclass(frozen=True, slots=True)
class Priors:
    """Speeds assumed before any measurement."""

    prefill_tokens_per_s: float
    decode_prefill_tokens_per_s: float
    kv_bytes_per_s: float = 1e9
    """Bandwidth between any two workers."""
    loan_overhead_s: float = 0.003
    """Fixed seconds of a loan: handshake and the last read."""
    step_s: float = 0.001
    """Fixed seconds of a prompt on either kind of worker."""
    stream_delay_s: float = 0.001
    """Seconds that one more running stream costs on a decode worker; spreads streams where nothing else decides."""


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """Speeds of W workers, in order of their ids.

    Learning writes into the arrays: read them before the next event.
    """

    prefill_tokens_per_s: Floats
    """Prompt tokens per second as a lender, [W]."""
    prefill_fixed_s: Floats
    """Fixed seconds of a prompt as a lender, [W]."""
    decode_prefill_tokens_per_s: Floats
    """Prompt tokens per second beside running streams, [W]."""
    tail_fixed_s: Floats
    """Fixed seconds of a prompt beside running streams, [W]."""
    stream_delay_s: Floats
    """Seconds that one more stream costs, [W]."""
    kv_bytes_per_s: Floats
    """Bytes per second by borrower and lender, [W, W]."""
    loan_overhead_s: Floats
    """Fixed seconds of a loan by borrower and lender, [W, W]."""

    @classmethod
    def uniform(cls, num_workers: int, priors: Priors) -> "Rates":
        """Return equal speeds for all workers."""
        each, pairs = (num_workers,), (num_workers, num_workers)
        return cls(
            prefill_tokens_per_s=np.full(each, priors.prefill_tokens_per_s),
            prefill_fixed_s=np.full(each, priors.step_s),
            decode_prefill_tokens_per_s=np.full(each, priors.decode_prefill_tokens_per_s),
            tail_fixed_s=np.full(each, priors.step_s),
            stream_delay_s=np.full(each, priors.stream_delay_s),
            kv_bytes_per_s=np.full(pairs, priors.kv_bytes_per_s),
            loan_overhead_s=np.full(pairs, priors.loan_overhead_s),
        )


@dataclass(slots=True)
class LinearFit:
    """A line `fixed_s + amount * unit_s`, both above 0.

    An extended Kalman filter over the logarithms of the two, which drift, with clipped surprise of measurements. Their
    covariance P never exceeds DOUBT (drift fades near it), so the gain P h / (1 + h P h) never exceeds √DOUBT / 2
    whatever h is: one measurement moves neither value by more than MAX_FACTOR.
    """

    fixed_s: float
    unit_s: float
    num_seen: int = 0
    _fixed_variance: float = DOUBT
    _unit_variance: float = DOUBT
    _covariance: float = 0.0

    def seconds(self, amount: float) -> float:
        return self.fixed_s + amount * self.unit_s

    def observe(self, amount: float, seconds: float) -> None:
        """Learn that `amount` took `seconds`; neither is below 0."""
        assert amount >= 0
        assert seconds >= 0
        self.num_seen += 1
        predicted = self.seconds(amount)
        surprise = math.log(max(seconds, LEAST) / predicted)
        surprise = max(-MAX_SURPRISE, min(MAX_SURPRISE, surprise))
        fixed = self.fixed_s / predicted
        unit = 1 - fixed
        to_fixed = self._fixed_variance * fixed + self._covariance * unit
        to_unit = self._covariance * fixed + self._unit_variance * unit
        doubt = 1 + fixed * to_fixed + unit * to_unit
        self.fixed_s = _bounded(self.fixed_s * math.exp(surprise * to_fixed / doubt))
        self.unit_s = _bounded(self.unit_s * math.exp(surprise * to_unit / doubt))
        kept = 1 - DRIFT / DOUBT
        self._fixed_variance = kept * (self._fixed_variance - to_fixed * to_fixed / doubt) + DRIFT
        self._unit_variance = kept * (self._unit_variance - to_unit * to_unit / doubt) + DRIFT
        self._covariance = kept * (self._covariance - to_fixed * to_unit / doubt)

    def fresh(self) -> "LinearFit":
        """Return a new line that starts from the present values."""
        return LinearFit(self.fixed_s, self.unit_s)


def _bounded(seconds: float) -> float:
    return max(LEAST, min(MOST, seconds))


@dataclass(slots=True)
class LinearFits:
    """Lines by worker; a worker without measurements has the mean of all, at first the prior."""

    mean: LinearFit
    by_worker: dict[str, LinearFit] = field(default_factory=dict)

    def observe(self, worker_id: str, amount: float, seconds: float) -> None:
        if (line := self.by_worker.get(worker_id)) is None:
            line = self.by_worker[worker_id] = self.mean.fresh()
        line.observe(amount, seconds)
        self.mean.observe(amount, seconds)

    def of(self, worker_id: str) -> LinearFit:
        return self.by_worker.get(worker_id, self.mean)

    def keep(self, worker_ids: Container[str]) -> None:
        """Forget all other workers; the mean stays."""
        self.by_worker = {worker_id: line for worker_id, line in self.by_worker.items() if worker_id in worker_ids}


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
