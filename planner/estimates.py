"""Estimates of workers' speed and of arrivals to come.

Immutable values: each observation gives new ones. Pure.
"""

import copy
import math
from dataclasses import dataclass, replace

from planner.config import PolicyConfig
from planner.observation import Counters, Observation
from router.placement.rates import LinearFit

LEVEL_S, TREND_S = 60.0, 180.0
"""Seconds after which the arrival rate, and its trend, count for less than 1/e."""
RUNNING_S = 20.0
"""Seconds after which running streams count for less than 1/e."""
REQUESTS = 1000.0
"""Requests after which prompt lengths and their computed share count for less than 1/e."""
BUSY_S = 1200.0
"""Seconds of a busy worker after which its measured speed counts for less than 1/e."""
MISSES = 100.0
"""Requests after which the share that misses the SLO counts for less than 1/e."""
LEAST = 1e-9
DOUBT = 0.05
"""Weight of a prior, as a share of what is remembered."""
MOST_GROWTH = 2.0
"""Largest predicted arrival rate, as a multiple of the present one."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A running ratio of an amount per unit, such as seconds per request.

    Old units count less; idle time forgets nothing.
    """

    amount: float
    units: float
    memory: float

    @classmethod
    def prior(cls, value: float, memory: float) -> "Ratio":
        return cls(value * DOUBT * memory, DOUBT * memory, memory)

    @property
    def value(self) -> float:
        return self.amount / self.units

    def updated(self, amount: float, units: float) -> "Ratio":
        """Return the ratio with a new observation; neither argument is below 0."""
        kept = math.exp(-units / self.memory)
        return replace(self, amount=self.amount * kept + amount, units=self.units * kept + units)


@dataclass(frozen=True, slots=True)
class ArrivalForecast:
    """Forecast of the arrival rate by Holt's smoothing: level and trend over minutes, no time of day."""

    level: float = 0.0
    trend: float = 0.0
    """Change of the rate per second."""
    seen_s: float = 0.0

    def updated(self, count: float, over_s: float) -> "ArrivalForecast":
        """Return the forecast after `count` arrivals within `over_s` > 0.

        Early observations weigh equally.
        """
        seen_s = self.seen_s + over_s
        weight = max(1 - math.exp(-over_s / LEVEL_S), over_s / seen_s)
        expected = max(0.0, self.level + self.trend * over_s)
        level = expected + weight * (count / over_s - expected)
        trend = 0.0
        if seen_s > LEVEL_S:
            trend_weight = 1 - math.exp(-over_s / TREND_S)
            trend = self.trend + trend_weight * ((level - self.level) / over_s - self.trend)
        return ArrivalForecast(level, trend, seen_s)

    def at(self, ahead_s: float) -> float:
        """Return the rate predicted for `ahead_s` from now, at least the present rate.

        A lower prediction is not used: a pool that waits for less load would be late twice.
        """
        return min(MOST_GROWTH * self.level, max(self.level, self.level + self.trend * ahead_s))


@dataclass(frozen=True, slots=True)
class Estimates:
    """Estimates of one model's workers and requests."""

    arrivals: ArrivalForecast
    """Requests per second."""
    prompt_tokens: Ratio
    """Prompt tokens per request."""
    computed_share: Ratio
    """Share of prompt tokens that no cache held."""
    prefill_tokens_per_s: Ratio
    """Prompt tokens per second of a busy prefill worker."""
    prefill_s: Ratio
    """Seconds of a busy prefill worker per request."""
    stream_blocks: Ratio
    """KV blocks per running stream."""
    itl: LinearFit
    """Inter-token latency in seconds, by streams of a decode worker. Never changed in place."""
    running: float = 0.0
    """Recent number of running streams."""
    ttft_missed: Ratio = Ratio(0.0, MISSES, MISSES)
    """Share of requests that missed the TTFT SLO, refused requests included."""
    itl_missed: Ratio = Ratio(0.0, MISSES, MISSES)

    @classmethod
    def priors(cls, config: PolicyConfig) -> "Estimates":
        return cls(
            arrivals=ArrivalForecast(),
            prompt_tokens=Ratio.prior(config.prompt_tokens, REQUESTS),
            computed_share=Ratio.prior(1.0, REQUESTS * config.prompt_tokens),
            prefill_tokens_per_s=Ratio.prior(config.prefill_tokens_per_s, BUSY_S),
            prefill_s=Ratio.prior(config.prompt_tokens / config.prefill_tokens_per_s, REQUESTS),
            stream_blocks=Ratio(0.0, LEAST, REQUESTS),  # nothing is known: the first observation decides
            itl=LinearFit(config.step_s, config.stream_delay_s),
        )

    def updated(self, before: Observation, now: Observation) -> "Estimates":
        """Return the estimates after the time between two observations."""
        over_s = now.at_s - before.at_s
        new: Counters = now.counters.since(before.counters)
        busy_s = over_s * (before.prefill.busy + now.prefill.busy) / 2
        weight = 1 - math.exp(-over_s / RUNNING_S)
        computed = min(new.ended_tokens, new.lent_tokens + new.own_tokens)
        return replace(
            self,
            arrivals=self.arrivals.updated(new.arrived, over_s),
            prompt_tokens=self.prompt_tokens.updated(new.arrived_tokens, new.arrived),
            computed_share=self.computed_share.updated(computed, new.ended_tokens),
            prefill_tokens_per_s=self.prefill_tokens_per_s.updated(new.lent_tokens, busy_s),
            prefill_s=self.prefill_s.updated(busy_s, new.first_tokens),
            stream_blocks=self.stream_blocks.updated(now.decode.used_blocks, now.decode.running),
            itl=_itl_seen(self.itl, before, now, new),
            running=self.running + weight * (now.decode.running - self.running),
            ttft_missed=self.ttft_missed.updated(new.ttft_missed + new.refused, new.first_tokens + new.refused),
            itl_missed=self.itl_missed.updated(new.itl_missed, new.streams),
        )


def _itl_seen(line: LinearFit, before: Observation, now: Observation, new: Counters) -> LinearFit:
    """Return the ITL line after requests that ended in between, at the mean number of streams."""
    workers = before.decode.serving + now.decode.serving
    if not workers or new.streams < 1 or new.itl_sum_s <= 0:
        return line
    learnt = copy.copy(line)
    learnt.observe((before.decode.running + now.decode.running) / workers, new.itl_sum_s / new.streams)
    return learnt
