"""Prefill side alone: the whole conversation trace on N prefill workers of 10,000 blocks of 512 tokens each.

N is sized for 0.8 utilisation without a cache, and arrivals are spread within the trace's 3 s ticks.

The decode side adds nothing: all prompts are lent, a prompt's tail takes a decode worker as long as a prefill worker,
moving KV takes almost no time, and the router learns nothing of decode workers' blocks. The cost policy has perfect
knowledge: it receives everything at once, and nothing waits for it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.traces import CONVERSATION, TICK_S
from cluster.roles import Role
from engine.backends.sim.timing import StepTiming
from engine.block_keys import BlockKey
from engine.core.loan_host import EngineLimits
from engine.core_types import StepBudget
from engine.kv.layout import KvLayout
from protos import membership_pb2 as pb
from router.admission.config import AdmissionConfig
from router.placement.candidates import Route
from router.placement.demand import Demand
from router.placement.fleet import Fleet
from router.placement.place import Decision
from router.placement.rates import Ints, Priors, Rates
from router.placement.worker_records import ActivePlacement, Worker
from router.placement.worker_table import Hits
from simulator.cluster import ClusterSpec, FleetMaker, SimCluster
from simulator.policies import LeastLoaded, PolicyFleet, RoundRobin
from simulator.request import EndState, Outcome, TraceRequest
from simulator.traces.reading import Trace, Window
from simulator.worker import WorkerSpec

BLOCK_TOKENS, NUM_BLOCKS = 512, 10_000
UTILISATION = 0.8
CHUNK = 2048
SLOW_TOKENS_PER_S = 10.0
EAGER = AdmissionConfig(max_lender_queue_s=1e9, long_prompt_lender_share=1.0, short_prompt_lenders=0)
"""Admission that starts everything at once."""


class Deaf(Fleet):
    """Fleet that learns nothing of decode workers' blocks and assumes them slow, so that all prompts are lent."""

    @property
    def rates(self) -> Rates:
        rates = super().rates
        return replace(rates, decode_prefill_tokens_per_s=np.full_like(rates.prefill_tokens_per_s, SLOW_TOKENS_PER_S))

    def cache_changed(self, worker: Worker, changed: pb.CacheEvents) -> bool:
        return True if worker.decodes else super().cache_changed(worker, changed)


class DeafAlone(Deaf):
    """Deaf fleet that also assumes that prefill workers cannot read from each other, so that they compute."""

    @property
    def rates(self) -> Rates:
        rates = super().rates
        bytes_per_s = rates.kv_bytes_per_s.copy()
        bytes_per_s[~self.snapshot.decodes] = 1e-3
        return replace(rates, kv_bytes_per_s=bytes_per_s)


class DeafRoundRobin(Deaf, RoundRobin):
    pass


class DeafLeastLoaded(Deaf, LeastLoaded):
    pass


class CostPolicy(Deaf, PolicyFleet):
    """Policy of the README's table: queue + uncached prefill of its own placements, known exactly and at once."""

    tokens_per_s: float
    clock: Callable[[], float]

    def __init__(self, router_id: str, priors: Priors, learn_rates: bool) -> None:
        super().__init__(router_id, priors, learn_rates)
        self._free_at: dict[str, float] = {}
        self._cached: dict[str, OrderedDict[BlockKey, None]] = {}

    def placed(self, decision: Decision, demand: Demand, keys: Sequence[BlockKey]) -> ActivePlacement:
        if decision.lender_id is not None:
            name, now = decision.lender_id, self.clock()
            missing = len(keys) - self._held(name, keys)
            self._free_at[name] = max(now, self._free_at.get(name, 0.0)) + missing * BLOCK_TOKENS / self.tokens_per_s
            cached = self._cached.setdefault(name, OrderedDict())
            for key in reversed(keys):  # the tail of a chain is evicted before its beginning
                cached[key] = None
                cached.move_to_end(key)
            while len(cached) > NUM_BLOCKS:
                cached.popitem(last=False)
        return super().placed(decision, demand, keys)

    def _choose(self, demand: Demand, keys: Sequence[BlockKey], hits: Hits, decoders: Ints, lenders: Ints) -> Route:
        decode = int(decoders[self.snapshot.running[decoders].argmin()])
        if not len(lenders):
            return Route(decode)
        lender = min(lenders.tolist(), key=lambda row: self._cost_s(self.snapshot.ids[row], keys))
        return Route(decode, lender, computes=True)

    def _cost_s(self, name: str, keys: Sequence[BlockKey]) -> float:
        queue_s = max(0.0, self._free_at.get(name, 0.0) - self.clock())
        return queue_s + (len(keys) - self._held(name, keys)) * BLOCK_TOKENS / self.tokens_per_s

    def _held(self, name: str, keys: Sequence[BlockKey]) -> int:
        cached = self._cached.get(name, {})
        return next((place for place, key in enumerate(keys) if key not in cached), len(keys))


@dataclass(frozen=True, slots=True)
class Side:
    """TTFT under one policy, and the share of all blocks that no worker computed anew."""

    mean_s: float
    p50_s: float
    p99_s: float
    hit_rate: float


def requests(limit: int | None = None) -> list[TraceRequest]:
    return list(Trace(CONVERSATION, Window(spread_s=TICK_S, most=limit)))


def run(
    trace: Sequence[TraceRequest],
    num_workers: int,
    make_fleet: FleetMaker | None,
    routers: int = 1,
    lag_s: float = 0.05,
    message_s: float = 0.0005,
    admission: AdmissionConfig | None = None,
    on_progress: Callable[[float], object] = lambda _: None,
) -> Side:
    """Return the TTFT of the whole trace; without `make_fleet`, under the cost policy."""
    tokens_per_s = sum(r.input_tokens for r in trace) / trace[-1].arrival_s / num_workers / UTILISATION
    outcomes: list[Outcome] = []
    spec = ClusterSpec(
        workers=tuple(workers(num_workers, tokens_per_s)),
        priors=Priors(tokens_per_s, tokens_per_s, 1e12, 1e-3, 1e-4, 1e-4),
        num_routers=routers,
        message_s=message_s,
        event_lag_s=lag_s,
        make_fleet=make_fleet or CostPolicy,
        admission=admission or AdmissionConfig(),
    )
    cluster = SimCluster(spec, outcomes.append)
    CostPolicy.tokens_per_s, CostPolicy.clock = tokens_per_s, cluster.clock.time
    cluster.run(one_token(trace), on_progress)
    assert all(outcome.end_state is EndState.FINISHED for outcome in outcomes)
    ttft_s = np.array([outcome.ttft_s for outcome in outcomes])
    blocks = sum(-(-r.input_tokens // BLOCK_TOKENS) for r in trace)
    reused = sum(outcome.reused_tokens for outcome in outcomes) / BLOCK_TOKENS / blocks
    p50, p99 = np.quantile(ttft_s, [0.5, 0.99])
    return Side(float(ttft_s.mean()), float(p50), float(p99), reused)


def workers(num_workers: int, tokens_per_s: float) -> Iterator[tuple[str, WorkerSpec]]:
    """Yield N prefill workers and as many decode workers that never run out of capacity."""
    timing = StepTiming(step_s=1e-4, prompt_token_s=1 / tokens_per_s)
    layout = KvLayout(layers=1, kv_heads=1, head_dim=4, block_tokens=BLOCK_TOKENS, dtype="bfloat16")
    limits = EngineLimits(StepBudget(CHUNK, CHUNK))
    counts: tuple[tuple[Role, int], ...] = (("prefill", num_workers), ("decode", 2 * num_workers))
    for role, count in counts:
        for number in range(count):
            yield f"{role}-{number}", WorkerSpec(role, layout, NUM_BLOCKS, timing, limits, 1e12)


def one_token(trace: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
    """Yield the requests with one output token, because decoding is not measured."""
    for r in trace:
        yield TraceRequest(r.number, r.arrival_s, r.input_tokens, 1, r.hash_ids, r.hash_tokens)
