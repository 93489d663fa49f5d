"""Search for the smallest cluster that keeps the SLO, disaggregated and aggregated.

Check of a plan: requests as it assumes them, through the clusters that it found.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from sizing.comparison.advice import MARGIN, Verdict
from sizing.comparison.replay import Run, Scenario, Setup, bill, replay
from sizing.gpus import Gpu, Roofline
from sizing.plan.layouts import AggregatedPlan, DecodePool, DisaggregatedPlan, PrefillPool
from sizing.plan.load import MAX_RATE, Lengths, OfferedLoad
from sizing.plan.prompts import PromptQueue
from sizing.plan.streams import Streams
from workloads.request import BadSetup, TraceRequest

GOAL = 0.9
"""Share of requests that must keep TTFT and ITL."""
MODEL_ERROR = 0.15
"""Error of the formulas: disaggregated / aggregated goodput beside that of simulated clusters. In six of
seven settings of docs/published-results.md it is no more."""
TPS = (1, 2, 4, 8)
STAGES = (1, 2, 4, 8)
"""Numbers of pipeline stages, the fewest first: more than one for models that fit no host."""
MAX_WORKERS = 1 << 14
"""Largest number of workers of a pool. Parts of the SLO that so many miss are missed by any number, unless they are too
few for the load."""
_TOO_MANY = "workers: "


@dataclass(frozen=True)
class Option:
    """A cluster that keeps the SLO; `model` is its plan."""

    model: DisaggregatedPlan | AggregatedPlan
    setup: Setup
    """Setup, ready to be replayed with `scenario`, which has the numbers of workers."""
    scenario: Scenario
    gpus: int
    usd_per_hour: float
    usd_per_million: float
    """Price of a million output tokens in USD."""


@dataclass(frozen=True)
class Plan:
    """Both kinds of cluster; None: no cluster of that kind keeps the SLO, for the reason in `why_not`."""

    setup: Setup
    load: OfferedLoad
    apart: Option | None
    together: Option | None
    why_not: dict[str, str]
    """Reasons by "disaggregated" and "aggregated"."""

    @cached_property
    def harder(self) -> Option | None:
        """Cheaper kind of cluster under MODEL_ERROR more load; None: no such cluster keeps the SLO.

        Only for plans with both kinds.
        """
        assert self.apart is not None
        assert self.together is not None
        load = replace(self.load, rate=min(MAX_RATE, self.load.rate * (1 + MODEL_ERROR)))
        kind = _apart if self._cost(self.apart) < self._cost(self.together) else _together
        return _best({}, "", kind(self.setup, load, {}))

    @cached_property
    def verdict(self) -> Verdict | None:
        """Verdict; None: nothing keeps the SLO, or a kind is larger than a plan counts.

        Even: prices differ by MARGIN or less, or not for sure, since the formulas are only so exact (MODEL_ERROR).
        """
        if self._too_many or (self.apart is None and self.together is None):
            return None
        if self.together is None:
            return "disaggregate"
        if self.apart is None:
            return "aggregate"
        apart, together = self._cost(self.apart), self._cost(self.together)
        if abs(apart - together) <= MARGIN * together:
            return "even"
        if self.harder is None or self._cost(self.harder) >= max(apart, together):
            return "even"
        return "disaggregate" if apart < together else "aggregate"

    @property
    def advice(self) -> str:
        """Advice in one sentence."""
        if self.apart is None and self.together is None:
            return f"Nothing keeps the SLO: {self.why_not['aggregated']}"
        if self._too_many:
            return f"Nothing to compare: {self._too_many}"
        if self.together is None:
            return f"Disaggregate: without, no cluster keeps the SLO: {self.why_not['aggregated']}"
        if self.apart is None:
            return f"Do not disaggregate: with it no cluster keeps the SLO: {self.why_not['disaggregated']}"
        apart, together = self._cost(self.apart), self._cost(self.together)
        change = f"{self._price(self.apart)} instead of {self._price(self.together)}, {apart / together - 1:+.0%}"
        match self.verdict:
            case "disaggregate":
                return f"Disaggregate: {change}"
            case "aggregate":
                return f"Do not disaggregate: {change}"
        even = "Even, so do not disaggregate: aggregated has fewer parts"
        if apart == together:
            return f"{even}, and both take {self._price(self.together)}"
        if abs(apart - together) <= MARGIN * together:
            return f"{even}; {change}, which is within the margin of {MARGIN:.0%}"
        kind = "disaggregated" if apart < together else "aggregated"
        more = f"{MODEL_ERROR:.0%} more load, which is how exact the formulas are"
        if self.harder is None:
            return f"{even}; {change}, but with {more}, no {kind} cluster keeps the SLO"
        return f"{even}; {change}, but with {more}, {kind} takes {self._price(self.harder)}"

    @property
    def _too_many(self) -> str:
        return next((why for why in self.why_not.values() if why.startswith(_TOO_MANY)), "")

    def _cost(self, option: Option) -> float:
        """Return USD an hour, or GPUs where they cost nothing."""
        assert self.together is not None
        return option.usd_per_hour if self.together.usd_per_hour else option.gpus

    def _price(self, option: Option) -> str:
        assert self.together is not None
        return f"{option.usd_per_hour:,.2f} USD an hour" if self.together.usd_per_hour else f"{option.gpus:,} GPUs"


def plan(setup: Setup, load: OfferedLoad) -> Plan:
    """Plan a cluster; `setup` lacks only the number of GPUs and their TP, and the stages where `pp` is 1.

    Raises BadSetup where the model fits no worker.
    """
    setup = _with_stages(replace(setup, sequence_tokens=load.context))
    why_not: dict[str, str] = {}
    together = _best(why_not, "aggregated", _together(setup, load, why_not))
    apart = _best(why_not, "disaggregated", _apart(setup, load, why_not))
    return Plan(setup, load, apart, together, why_not)


def _best(why_not: dict[str, str], kind: str, options: Iterable[Option]) -> Option | None:
    """Return the cheapest option, then the one with the fewest GPUs, then with the smallest TP."""
    best = min(options, key=lambda option: (option.usd_per_hour, option.gpus), default=None)
    if best is not None:
        why_not.pop(kind, None)
    return best


def _together(setup: Setup, load: OfferedLoad, why_not: dict[str, str]) -> Iterable[Option]:
    for tp in fitting(setup, setup.gpu):
        sized = replace(setup, gpus=tp * setup.pp * setup.dp, tp=tp)
        workers = smallest(lambda count: AggregatedPlan(sized, load, count).kept, setup.dp)  # noqa: B023
        if workers is None:
            why_not["aggregated"] = _why_together(AggregatedPlan(sized, load, MAX_WORKERS))
        else:
            yield _option(AggregatedPlan(sized, load, workers), sized, Scenario("aggregated", 0, workers))


def _apart(setup: Setup, load: OfferedLoad, why_not: dict[str, str]) -> Iterable[Option]:
    for tp in fitting(setup, setup.gpu):
        for decode_tp in fitting(setup, setup.decode_gpu or setup.gpu):
            sized = replace(setup, gpus=tp * setup.pp * setup.dp, tp=tp, decode_tp=decode_tp)
            endless = apart_of(sized, load, MAX_WORKERS, MAX_WORKERS)
            if endless.kept < GOAL:
                why_not["disaggregated"] = _why_apart(endless)
            elif (shape := _smallest_apart(sized, load)) is not None:
                yield _option(apart_of(sized, load, *shape), sized, Scenario("disaggregated", *shape))


def apart_of(setup: Setup, load: OfferedLoad, prefill: int, decode: int) -> DisaggregatedPlan:
    return DisaggregatedPlan(PrefillPool(setup, load, prefill), DecodePool(setup, load, decode))


def _smallest_apart(setup: Setup, load: OfferedLoad) -> tuple[int, int] | None:
    """Return the cheapest numbers of prefill and decode workers.

    Neither pool can be smaller than beside an unlimited other one.
    """
    least_prefill = smallest(lambda count: apart_of(setup, load, count, MAX_WORKERS).kept, setup.dp)
    least_decode = smallest(lambda count: apart_of(setup, load, MAX_WORKERS, count).kept, setup.dp)
    assert least_decode is not None
    candidates: list[tuple[float, int, int, int]] = []
    for decode in range(least_decode, least_decode + max(3 * setup.dp, least_decode // 4), setup.dp):
        prefill = smallest(lambda count: apart_of(setup, load, count, decode).kept, setup.dp)  # noqa: B023
        if prefill is not None:
            gpus, usd_per_hour = bill(setup, Scenario("disaggregated", prefill, decode))
            candidates.append((usd_per_hour, gpus, prefill, decode))
        if prefill == least_prefill:
            break
    return min(candidates)[2:] if candidates else None


def smallest(kept_by: Callable[[int], float], group: int = 1) -> int | None:
    """Return the number of workers with which GOAL of the requests keep the SLO, or None beyond MAX_WORKERS.

    It is a multiple of `group`. `kept_by` must not fall with the number.
    """
    if kept_by(MAX_WORKERS) < GOAL:
        return None
    high = 1
    while kept_by(high * group) < GOAL:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if kept_by(middle * group) >= GOAL else (middle, high)
    return high * group


def _with_stages(setup: Setup) -> Setup:
    """Return the setup with the fewest stages in which the model fits; raises BadSetup where it does not."""
    for stages in STAGES if setup.pp == 1 else (setup.pp,):
        staged = replace(setup, gpus=setup.tp * stages * setup.dp, pp=stages)
        try:
            for gpu in (setup.gpu, setup.decode_gpu or setup.gpu):
                fitting(staged, gpu)
        except BadSetup as error:
            refusal = error
        else:
            return staged
    raise refusal


def fitting(setup: Setup, gpu: Gpu) -> list[int]:
    """Return the TPs that divide the heads and leave memory for KV.

    A model that the vllm engine runs on one rank has that TP, where it fits. Raises BadSetup for none.
    """
    sizes, refusal = [], BadSetup("model", f"{setup.model.name} has {setup.model.heads} heads, no multiple of a TP")
    for tp in TPS:
        if setup.model.heads % tp == 0:
            try:
                Roofline(setup.model, gpu, tp, setup.pp, setup.dp).num_blocks(setup.block_tokens, setup.sequence_tokens)
            except BadSetup as error:
                refusal = error
            else:
                sizes.append(tp)
    if not sizes:
        raise refusal
    return [1] if setup.model.undivided and 1 in sizes else sizes


def _option(model: DisaggregatedPlan | AggregatedPlan, setup: Setup, scenario: Scenario) -> Option:
    gpus, usd_per_hour = bill(setup, scenario)
    load = model.load
    usd_per_million = usd_per_hour / (load.rate * load.output * 3600) * 1e6
    return Option(model, setup, scenario, gpus, usd_per_hour, usd_per_million)


def _why_together(endless: AggregatedPlan) -> str:
    full = endless.line.waiting.full or endless.overloaded
    return _why(
        endless,
        f"TP {endless.setup.tp}{endless.setup.beyond_tp}",
        endless.streams,
        endless.line_at(1.0),
        endless.held,
        full,
    )


def _why_apart(endless: DisaggregatedPlan) -> str:
    setup = endless.setup
    tp = f"TP {setup.tp} for prefill, {setup.decode_tp} for decode{setup.beyond_tp}"
    line = endless.prefill.line
    full = line.waiting.full or endless.decode.overloaded or endless.link_utilisation >= 1
    return _why(endless, tp, endless.decode.streams, line, endless.decode.held(endless.ttft_s), full)


def _why(
    endless: DisaggregatedPlan | AggregatedPlan, tp: str, streams: Streams, line: PromptQueue, held: float, full: bool
) -> str:
    """Return what no number of workers repairs: the part of the SLO that is kept least.

    Or that MAX_WORKERS are too few, where they are `full` or lack memory for what is `held`, and a request alone would
    keep the SLO.
    """
    slo, load = endless.setup.slo, endless.load
    prompt, parts = load.prompts.quantile(GOAL), endless.parts
    possible = line.steps.alone(prompt)[0] <= slo.ttft_s and streams.step_s(1) <= slo.itl_s
    if possible and streams.fit >= 1 and (full or held > MAX_WORKERS * streams.fit):
        return f"{_TOO_MANY}{load.rate:g} requests/s would take more than {MAX_WORKERS:,} of them in a pool ({tp})"
    match min(parts, key=lambda name: parts[name]):
        case "ttft":
            alone_s = endless.unqueued_s(prompt)
            return (
                f"ttft: a prompt of {prompt:,.0f} tokens (p90) alone takes {alone_s:.3g} s, not {slo.ttft_s:g} ({tp})"
            )
        case "itl":
            alone_ms, limit_ms = 1e3 * streams.step_s(1), 1e3 * slo.itl_s
            return f"itl: a step of a single stream takes {alone_ms:.3g} ms, not {limit_ms:g} ({tp})"
        case _:
            tokens = f"{load.context:,.0f} tokens in the mean"
            return f"memory: a stream has {tokens}, a worker's pool room for {streams.pool_tokens:,} ({tp})"


def requests_of(load: OfferedLoad, count: int, seed: int = 0) -> Iterator[TraceRequest]:
    """Yield Poisson arrivals with lognormal lengths; the cached part is a prefix common to all prompts."""
    rng, at_s = random.Random(seed), 0.0
    for number in range(count):
        at_s += rng.expovariate(load.rate)
        prompt, output = _length(rng, load.prompts), _length(rng, load.outputs)
        shared = round(prompt * load.hit_rate / 64)
        rest = -(-prompt // 64) - shared
        hash_ids = (*range(shared), *(1 << 20 | (number + place) % (1 << 20) for place in range(rest)))
        yield TraceRequest(number, at_s, prompt, output, hash_ids if shared else (), 64)


def check(option: Option, count: int, seed: int = 0, on_progress: Callable[[float], object] = lambda _: None) -> Run:
    """Run `count` requests of the plan's load through the option's cluster."""
    return replay(option.setup, option.scenario, requests_of(option.model.load, count, seed), on_progress)


def _length(rng: random.Random, lengths: Lengths) -> int:
    sigma = math.sqrt(math.log1p(lengths.variation**2))
    return max(1, round(lengths.mean * math.exp(sigma * rng.gauss(0, 1) - sigma**2 / 2)))
