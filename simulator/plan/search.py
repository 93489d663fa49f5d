"""The smallest cluster that keeps the SLO for a load: of prefill and decode workers, and of workers that do both."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from simulator.errors import BadSetup
from simulator.gpus import Gpu, Roofline
from simulator.plan.apart import Apart, DecodePool, PrefillPool
from simulator.plan.load import Load
from simulator.plan.streams import Streams
from simulator.plan.together import Together
from simulator.replay import Scenario, Setup, bill
from simulator.report import MARGIN

GOAL = 0.9
"""Of the requests: so many keep the TTFT and the ITL."""
TPS = (1, 2, 4, 8)
MAX_WORKERS = 1 << 14
"""Of a pool. What so many do not keep, no number does."""


@dataclass(frozen=True)
class Option:
    """A cluster that keeps the SLO. `model` says what of it was counted."""

    model: Apart | Together
    setup: Setup
    """Ready to be replayed with `scenario`, which says how many workers there are."""
    scenario: Scenario
    gpus: int
    usd_per_hour: float
    usd_per_million: float
    """Output tokens."""


@dataclass(frozen=True)
class Plan:
    """Both kinds; None: no cluster of that kind keeps the SLO, and `why_not` says what stands in its way."""

    setup: Setup
    load: Load
    apart: Option | None
    together: Option | None
    why_not: dict[str, str]
    """By "disaggregated" and "aggregated"."""

    @property
    def advice(self) -> str:
        """In one sentence."""
        if self.apart is None and self.together is None:
            return f"Nothing keeps the SLO: {self.why_not['aggregated']}"
        if self.together is None:
            return f"Disaggregate: without, no cluster keeps the SLO: {self.why_not['aggregated']}"
        if self.apart is None:
            return f"Do not disaggregate: with it no cluster keeps the SLO: {self.why_not['disaggregated']}"
        change = self.apart.usd_per_hour / self.together.usd_per_hour - 1
        apart, together = (f"{each.usd_per_hour:,.2f} USD an hour" for each in (self.apart, self.together))
        if change < -MARGIN:
            return f"Disaggregate: {apart} instead of {together}, {change:+.0%}"
        if change > MARGIN:
            return f"Do not disaggregate: {apart} instead of {together}, {change:+.0%}"
        return f"Disaggregation makes no difference: {apart}, or {together}"


def plan(setup: Setup, load: Load) -> Plan:
    """`setup` says everything but how many GPUs and their TP. Raises BadSetup where the model fits no worker."""
    why_not: dict[str, str] = {}
    together = _best(why_not, "aggregated", _together(setup, load, why_not))
    apart = _best(why_not, "disaggregated", _apart(setup, load, why_not))
    return Plan(setup, load, apart, together, why_not)


def _best(why_not: dict[str, str], kind: str, found: Iterable[Option]) -> Option | None:
    """The cheapest, of equal ones that of the least TP."""
    best = min(found, key=lambda option: option.usd_per_hour, default=None)
    if best is not None:
        why_not.pop(kind, None)
    return best


def _together(setup: Setup, load: Load, why_not: dict[str, str]) -> Iterable[Option]:
    for tp in fitting(setup, setup.gpu):
        sized = replace(setup, gpus=tp, tp=tp)
        workers = smallest(lambda count: Together(sized, load, count).kept)  # noqa: B023
        if workers is None:
            why_not["aggregated"] = _why_together(Together(sized, load, MAX_WORKERS))
        else:
            yield _option(Together(sized, load, workers), sized, Scenario("aggregated", 0, workers))


def _apart(setup: Setup, load: Load, why_not: dict[str, str]) -> Iterable[Option]:
    for tp in fitting(setup, setup.gpu):
        for decode_tp in fitting(setup, setup.decode_gpu or setup.gpu):
            sized = replace(setup, gpus=tp, tp=tp, decode_tp=decode_tp)
            endless = apart_of(sized, load, MAX_WORKERS, MAX_WORKERS)
            if endless.kept < GOAL:
                why_not["disaggregated"] = _why_apart(endless)
            elif (shape := _smallest_apart(sized, load)) is not None:
                yield _option(apart_of(sized, load, *shape), sized, Scenario("disaggregated", *shape))


def apart_of(setup: Setup, load: Load, prefill: int, decode: int) -> Apart:
    return Apart(PrefillPool(setup, load, prefill), DecodePool(setup, load, decode))


def _smallest_apart(setup: Setup, load: Load) -> tuple[int, int] | None:
    """Prefill and decode workers; the cheapest. Neither pool can be smaller than beside an endless other one."""
    least_prefill = smallest(lambda count: apart_of(setup, load, count, MAX_WORKERS).kept)
    least_decode = smallest(lambda count: apart_of(setup, load, MAX_WORKERS, count).kept)
    assert least_decode is not None
    found: list[tuple[float, int, int]] = []
    for decode in range(least_decode, least_decode + max(3, least_decode // 4)):
        prefill = smallest(lambda count: apart_of(setup, load, count, decode).kept)  # noqa: B023
        if prefill is not None:
            _, usd_per_hour = bill(setup, Scenario("disaggregated", prefill, decode))
            found.append((usd_per_hour, prefill, decode))
        if prefill == least_prefill:
            break
    return min(found)[1:] if found else None


def smallest(kept_by: Callable[[int], float]) -> int | None:
    """Workers with which GOAL of the requests keep the SLO; it must not fall with their number. None: MAX_WORKERS are
    too few."""
    if kept_by(MAX_WORKERS) < GOAL:
        return None
    high = 1
    while kept_by(high) < GOAL:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if kept_by(middle) >= GOAL else (middle, high)
    return high


def fitting(setup: Setup, gpu: Gpu) -> list[int]:
    """TPs that divide the heads and leave room for KV beside the weights. Raises BadSetup for none."""
    found, refusal = [], BadSetup("model", f"{setup.model.name} has {setup.model.heads} heads, no multiple of a TP")
    for tp in TPS:
        if setup.model.heads % tp == 0:
            try:
                Roofline(setup.model, gpu, tp).num_blocks(setup.block_tokens)
            except BadSetup as error:
                refusal = error
            else:
                found.append(tp)
    if not found:
        raise refusal
    return found


def _option(model: Apart | Together, setup: Setup, scenario: Scenario) -> Option:
    gpus, usd_per_hour = bill(setup, scenario)
    load = model.load
    usd_per_million = usd_per_hour / (load.rate * load.output * 3600) * 1e6
    return Option(model, setup, scenario, gpus, usd_per_hour, usd_per_million)


def _why_together(endless: Together) -> str:
    return _why(endless, f"TP {endless.setup.tp}", endless.streams)


def _why_apart(endless: Apart) -> str:
    setup = endless.setup
    return _why(endless, f"TP {setup.tp} for prefill, {setup.decode_tp} for decode", endless.decode.streams)


def _why(endless: Apart | Together, tp: str, streams: Streams) -> str:
    """What no number of workers mends: the part that is kept least."""
    slo, load = endless.setup.slo, endless.load
    parts = endless.parts
    match min(parts, key=lambda name: parts[name]):
        case "ttft":
            prompt = load.prompts.quantile(GOAL)
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
