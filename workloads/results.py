"""Results of a run: the figures that people, plots and plans need.

Histogram of millions of inter-token latencies in bounded memory, with bins 1 % wide.
"""

import math
from array import array
from dataclasses import dataclass

import numpy as np

from workloads.request import EndState, Outcome, check_above_0

BINS = 1 / math.log(1.01)
"""Bins per factor of e."""
LEAST_S = 1e-7
OFFSET = 1 + int(-math.log(LEAST_S) * BINS)


class LatencyHistogram:
    """Histogram of integer counts, so that the order of additions does not matter."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total_ns = 0
        self.count = 0

    def add(self, gap_s: float, count: int = 1) -> None:
        bin_number = int(math.log(gap_s) * BINS + OFFSET) if gap_s > LEAST_S else 0
        self._counts[bin_number] = self._counts.get(bin_number, 0) + count
        self._total_ns += round(gap_s * 1e9) * count
        self.count += count

    @property
    def mean_s(self) -> float:
        """Mean in seconds; nan without values."""
        return self._total_ns / self.count / 1e9 if self.count else math.nan

    def quantile_s(self, share: float) -> float:
        """Return a quantile, right within 1 %; nan without values."""
        reached = 0
        for number in sorted(self._counts):
            reached += self._counts[number]
            if reached >= share * self.count:
                return math.exp((number - OFFSET + 0.5) / BINS)
        return math.nan


SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Slo:
    """SLO that a request must keep to count."""

    ttft_s: float
    itl_s: float
    """Limit of a request's mean inter-token latency, in seconds."""

    def __post_init__(self) -> None:
        """Check the limits.

        Raises BadSetup.
        """
        check_above_0("ttft", self.ttft_s)
        check_above_0("itl", self.itl_s)

    def kept(self, outcome: Outcome) -> bool:
        return outcome.ttft_s <= self.ttft_s and outcome.itl_s <= self.itl_s


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Mean and quantiles in seconds; nan without values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: "array[float]") -> "LatencySummary":
        if not values:
            return cls(*((1 + len(SHARES)) * [math.nan]))
        column = np.frombuffer(values)
        quantiles = np.quantile(column, list(SHARES.values()))
        return cls(float(column.mean()), *(float(quantile) for quantile in quantiles))

    @classmethod
    def of_gaps(cls, gaps: LatencyHistogram) -> "LatencySummary":
        return cls(gaps.mean_s, *(gaps.quantile_s(share) for share in SHARES.values()))


@dataclass(frozen=True, slots=True)
class Results:
    """Results of one run.

    Times are of finished requests.
    """

    requests: int
    finished: int
    refused: int
    failed: int
    duration_s: float
    """Seconds from the trace's beginning to the last token."""
    arrivals_s: float
    """Seconds from the trace's beginning to the last arrival, equal for all compared clusters; at least the SLO's TTFT.
    """
    gpu_hours: float
    """GPU-hours paid for in `duration_s`."""
    input_tokens: int
    """Prompt tokens of finished requests, like the next figures."""
    output_tokens: int
    reused_tokens: int
    """Prompt tokens that no worker computed for the request."""
    moved_bytes: int
    placed_again: int
    """Number of attempts after the first."""
    ttft_s: LatencySummary
    itl_s: LatencySummary
    """Latency between any two tokens of one stream."""
    request_itl_s: LatencySummary
    """Mean latency of each request with two tokens, which the SLO limits."""
    e2e_s: LatencySummary
    kept: int
    """Number of requests that kept the SLO."""
    goodput_per_gpu: float
    """Requests that kept the SLO per second and GPU, over `arrivals_s`.

    The last streams' tail is excluded, since one long output would decide the figure."""
    usd_per_million_output_tokens: float
    hit_rate: float
    """Share of prompt tokens that were reused."""

    @property
    def kept_share(self) -> float:
        """Share of all requests that kept the SLO, refused ones included."""
        return self.kept / self.requests if self.requests else math.nan


class ResultCounter:
    """Counter of outcomes, with bounded memory per outcome."""

    def __init__(self, slo: Slo, began_at: float) -> None:
        self._slo = slo
        self._began_at = began_at
        self._ttft_s, self._itl_s, self._e2e_s = array("d"), array("d"), array("d")
        self._fates = dict.fromkeys(EndState, 0)
        self._kept = self._input = self._output = self._reused = self._moved = self._again = 0
        self._last_at = self._last_sent_at = began_at
        self.reasons: dict[str, int] = {}
        """Reasons of refusals and failures, with counts."""

    def add(self, outcome: Outcome) -> None:
        assert outcome.end_state is not None
        self._fates[outcome.end_state] += 1
        self._again += max(0, outcome.num_attempts - 1)
        self._last_sent_at = max(self._last_sent_at, outcome.sent_at)
        if outcome.end_state is not EndState.FINISHED:
            self.reasons[outcome.reason] = self.reasons.get(outcome.reason, 0) + 1
            return
        self._ttft_s.append(outcome.ttft_s)
        self._e2e_s.append(outcome.e2e_s)
        if outcome.num_emitted > 1:
            self._itl_s.append(outcome.itl_s)
        self._kept += self._slo.kept(outcome)
        self._input += outcome.request.input_tokens
        self._output += outcome.num_emitted
        self._reused += outcome.reused_tokens
        self._moved += outcome.moved_bytes
        self._last_at = max(self._last_at, outcome.last_token_at)

    @property
    def duration_s(self) -> float:
        """Seconds from the beginning to the last token."""
        return self._last_at - self._began_at

    @property
    def arrivals_s(self) -> float:
        """Seconds from the beginning to the last arrival, at least the SLO's TTFT."""
        return max(self._last_sent_at - self._began_at, self._slo.ttft_s)

    def results(
        self, gaps: LatencyHistogram, gpu_seconds: float, usd: float, gpu_seconds_of_arrivals: float
    ) -> Results:
        """Return the results.

        `usd` is the price of `gpu_seconds`, of which `gpu_seconds_of_arrivals` fell in `arrivals_s`.
        """
        duration_s = self.duration_s
        return Results(
            requests=sum(self._fates.values()),
            finished=self._fates[EndState.FINISHED],
            refused=self._fates[EndState.REFUSED],
            failed=self._fates[EndState.FAILED],
            duration_s=duration_s,
            arrivals_s=self.arrivals_s,
            gpu_hours=gpu_seconds / 3600,
            input_tokens=self._input,
            output_tokens=self._output,
            reused_tokens=self._reused,
            moved_bytes=self._moved,
            placed_again=self._again,
            ttft_s=LatencySummary.of(self._ttft_s),
            itl_s=LatencySummary.of_gaps(gaps),
            request_itl_s=LatencySummary.of(self._itl_s),
            e2e_s=LatencySummary.of(self._e2e_s),
            kept=self._kept,
            goodput_per_gpu=self._kept / gpu_seconds_of_arrivals if gpu_seconds_of_arrivals else 0.0,
            usd_per_million_output_tokens=usd / self._output * 1e6 if self._output else math.inf,
            hit_rate=self._reused / self._input if self._input else 0.0,
        )
