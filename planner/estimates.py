"""What workers turn out to be able to do, and what is to come. Values: each thing seen gives new ones. Pure."""

import copy
import math
from dataclasses import dataclass, replace

from planner.config import PolicyConfig
from planner.observation import Counters, Observation
from router.placement.rates import LinearFit

LEVEL_S, TREND_S = 60.0, 180.0
"""How long a rate of arrivals, and its trend, are remembered: what is older counts for less than 1/e."""
RUNNING_S = 20.0
"""Likewise running streams."""
REQUESTS = 1000.0
"""Likewise, in requests: how long prompts are, and which part of them is computed."""
BUSY_S = 1200.0
"""Likewise, in seconds of a busy worker: how fast one is."""
MISSES = 100.0
"""Likewise, in requests: which part of them misses the SLO."""
LEAST = 1e-9
DOUBT = 0.05
"""A prior counts as much as this part of what is remembered."""
MOST_GROWTH = 2.0
"""No more than so many times what comes now is predicted."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """An amount for each unit of another, of lately: the older, in units, the less it counts. Idleness forgets
    nothing."""

    amount: float
    units: float
    memory: float

    @classmethod
    def prior(cls, value: float, memory: float) -> "Ratio":
        return cls(value * DOUBT * memory, DOUBT * memory, memory)

    @property
    def value(self) -> float:
        return self.amount / self.units

    def seen(self, amount: float, units: float) -> "Ratio":
        """Neither below 0."""
        kept = math.exp(-units / self.memory)
        return replace(self, amount=self.amount * kept + amount, units=self.units * kept + units)


@dataclass(frozen=True, slots=True)
class ArrivalForecast:
    """A rate: Holt's linear smoothing, a level and a trend, both forgotten exponentially. It sees minutes: that it is
    nine o'clock on a Monday it does not know."""

    level: float = 0.0
    trend: float = 0.0
    """A second."""
    seen_s: float = 0.0

    def seen(self, count: float, over_s: float) -> "ArrivalForecast":
        """So many came within `over_s`, which is above 0. While little was seen, all of it counts alike."""
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
        """The rate then, or now where that is more: who waits for the future to be smaller would be late twice."""
        return min(MOST_GROWTH * self.level, max(self.level, self.level + self.trend * ahead_s))


@dataclass(frozen=True, slots=True)
class Estimates:
    """Of one model's workers and requests."""

    arrivals: ArrivalForecast
    """Requests a second."""
    prompt_tokens: Ratio
    """Of a request."""
    computed_share: Ratio
    """Of the tokens of prompts: those that no cache had."""
    prefill_tokens_per_s: Ratio
    """Of a prefill worker, while it has something to compute."""
    prefill_s: Ratio
    """Of a busy prefill worker, that a request takes."""
    stream_blocks: Ratio
    """Of KV, that a running stream takes."""
    itl: LinearFit
    """Seconds, by streams of a decode worker. Never changed in place."""
    running: float = 0.0
    """Streams, lately."""
    ttft_missed: Ratio = Ratio(0.0, MISSES, MISSES)
    """Part of the requests; refused ones are among them."""
    itl_missed: Ratio = Ratio(0.0, MISSES, MISSES)

    @classmethod
    def priors(cls, config: PolicyConfig) -> "Estimates":
        return cls(
            arrivals=ArrivalForecast(),
            prompt_tokens=Ratio.prior(config.prompt_tokens, REQUESTS),
            computed_share=Ratio.prior(1.0, REQUESTS * config.prompt_tokens),
            prefill_tokens_per_s=Ratio.prior(config.prefill_tokens_per_s, BUSY_S),
            prefill_s=Ratio.prior(config.prompt_tokens / config.prefill_tokens_per_s, REQUESTS),
            stream_blocks=Ratio(0.0, LEAST, REQUESTS),  # nothing is known: the first that is seen counts
            itl=LinearFit(config.step_s, config.stream_delay_s),
        )

    def seen(self, before: Observation, now: Observation) -> "Estimates":
        """What happened between the two, the later of which is later."""
        over_s = now.at_s - before.at_s
        new: Counters = now.counters.since(before.counters)
        busy_s = over_s * (before.prefill.busy + now.prefill.busy) / 2
        weight = 1 - math.exp(-over_s / RUNNING_S)
        computed = min(new.ended_tokens, new.lent_tokens + new.own_tokens)
        return replace(
            self,
            arrivals=self.arrivals.seen(new.arrived, over_s),
            prompt_tokens=self.prompt_tokens.seen(new.arrived_tokens, new.arrived),
            computed_share=self.computed_share.seen(computed, new.ended_tokens),
            prefill_tokens_per_s=self.prefill_tokens_per_s.seen(new.lent_tokens, busy_s),
            prefill_s=self.prefill_s.seen(busy_s, new.first_tokens),
            stream_blocks=self.stream_blocks.seen(now.decode.used_blocks, now.decode.running),
            itl=_itl_seen(self.itl, before, now, new),
            running=self.running + weight * (now.decode.running - self.running),
            ttft_missed=self.ttft_missed.seen(new.ttft_missed + new.refused, new.first_tokens + new.refused),
            itl_missed=self.itl_missed.seen(new.itl_missed, new.streams),
        )


def _itl_seen(line: LinearFit, before: Observation, now: Observation, new: Counters) -> LinearFit:
    """Of requests that ended in between, beside as many streams as there were before and are now."""
    workers = before.decode.serving + now.decode.serving
    if not workers or new.streams < 1 or new.itl_sum_s <= 0:
        return line
    learnt = copy.copy(line)
    learnt.observe((before.decode.running + now.decode.running) / workers, new.itl_sum_s / new.streams)
    return learnt
