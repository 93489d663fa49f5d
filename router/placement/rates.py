"""Speeds that placement reads, and lines learned online.

Pure.

Every duration here is a line: fixed seconds, and seconds per token, byte or stream.
"""

import math
from collections.abc import Container
from dataclasses import dataclass, field

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
    kv_bytes_per_s: float
    loan_overhead_s: float
    step_s: float
    """Fixed seconds of a prompt on either kind of worker."""
    stream_delay_s: float
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
