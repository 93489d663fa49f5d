"""How fast things go: what placement reads, and lines learnt online from what was measured. Pure.

Everything that takes time here is a line: so many seconds, and so many more for each token, byte or stream.
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
"""A measurement further from the prediction than by this factor counts as if it were this far."""
DOUBT = 0.25
"""Variance of a prior in the logarithm, in units of a measurement's: it counts as much as four of them."""
DRIFT = 0.0025
"""What a variance gains with each measurement, since machines change: a twentieth is the least weight of a new one."""
MAX_FACTOR = math.exp(MAX_SURPRISE * math.sqrt(DOUBT) / 2)
"""By which a single measurement moves anything at most."""
LEAST, MOST = 1e-12, 1e9
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Priors:
    """What is assumed before anything was measured."""

    prefill_tokens_per_s: float
    decode_prefill_tokens_per_s: float
    kv_bytes_per_s: float
    loan_overhead_s: float
    step_s: float
    """What a prompt costs on either kind of worker whatever its length."""
    stream_delay_s: float
    """What one more running stream on a decode worker costs; spreads streams where nothing else decides."""


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """What placement assumes of W workers, in order of their ids.

    What is learnt is written into the arrays: read them before the next event.
    """

    prefill_tokens_per_s: Floats
    """[W], as a lender."""
    prefill_fixed_s: Floats
    """[W]"""
    decode_prefill_tokens_per_s: Floats
    """[W], of prompts beside running streams."""
    tail_fixed_s: Floats
    """[W], of those."""
    stream_delay_s: Floats
    """[W]"""
    kv_bytes_per_s: Floats
    """[W, W], by borrower and lender."""
    loan_overhead_s: Floats
    """[W, W], by borrower and lender."""

    @classmethod
    def uniform(cls, num_workers: int, priors: Priors) -> "Rates":
        """The same for all."""
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
    """`fixed_s + amount * unit_s`, both above 0.

    An extended Kalman filter over the logarithms of the two, which drift, and of a measurement, whose surprise is
    clipped. Their covariance P never exceeds DOUBT (drift fades as it comes near), so the gain P h / (1 + h P h) never
    exceeds √DOUBT / 2 whatever h is: one measurement, whatever it says, moves neither by more than MAX_FACTOR.
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
        """`amount` took `seconds`; neither may be below 0."""
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
        """One that starts from here."""
        return LinearFit(self.fixed_s, self.unit_s)


def _bounded(seconds: float) -> float:
    return max(LEAST, min(MOST, seconds))


@dataclass(slots=True)
class LinearFits:
    """One line per worker; a worker that was never seen has the mean of all, which is the prior at first."""

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
        """Forget all others; the mean stays."""
        self.by_worker = {worker_id: line for worker_id, line in self.by_worker.items() if worker_id in worker_ids}
