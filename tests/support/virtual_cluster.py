"""Small clusters in virtual time, and requests for them."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from cluster.roles import Role
from engine.backends.sim.settings import StepTiming
from engine.core.loan_host import EngineLimits
from engine.core_types import StepBudget
from kvcache.layout import KvLayout
from router.placement.rates import Priors
from sizing.cluster.clock import VirtualClock
from sizing.cluster.cluster import ClusterSpec, Failure, SimCluster, audit
from sizing.cluster.worker import WorkerSpec
from workloads.request import Outcome, TraceRequest

WIDTH = 16
LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=1024, block_tokens=WIDTH, dtype="bfloat16")
TIMING = StepTiming(0.004, 1 / 20_000, 1e-9, 3e-5, 5e-8)
PRIORS = Priors(20_000, 20_000, 1e9, 0.002, 0.004, 1e-4)


def worker_spec(role: Role, num_blocks: int = 400, reserve: int = 256, nic_bytes_per_s: float = 2e9) -> WorkerSpec:
    chunk = 256 if role == "prefill" else 64
    limits = EngineLimits(StepBudget(512, chunk), reserve_output_tokens=reserve)
    return WorkerSpec(role, LAYOUT, num_blocks, TIMING, limits, nic_bytes_per_s)


def cluster_spec(num_prefill: int, num_decode: int, num_blocks: int = 400, reserve: int = 256) -> ClusterSpec:
    prefill = [(f"prefill-{n}", worker_spec("prefill", num_blocks, reserve)) for n in range(num_prefill)]
    decode = [(f"decode-{n}", worker_spec("decode", num_blocks, reserve)) for n in range(num_decode)]
    return ClusterSpec((*prefill, *decode), PRIORS)


def random_requests(
    seed: int, count: int, rate: float, most_input: int = 2000, most_output: int = 60
) -> list[TraceRequest]:
    """Of a few conversations, so that prefixes are shared."""
    rng, at_s = random.Random(seed), 0.0
    conversations = [[rng.randrange(1 << 20) for _ in range(most_input // 64 + 1)] for _ in range(4)]
    requests = []
    for number in range(count):
        at_s += rng.expovariate(rate)
        length = rng.randint(1, most_input)
        hash_ids = tuple(rng.choice(conversations)[: -(-length // 64)])
        requests.append(TraceRequest(number, at_s, length, rng.randint(1, most_output), hash_ids, 64))
    return requests


class Observed:
    """A run, and all that it said to the world."""

    def __init__(self, spec: ClusterSpec, requests: Iterable[TraceRequest], **changes: object) -> None:
        self.outcomes: list[Outcome] = []
        self.cluster = SimCluster(replace(spec, **changes), self.outcomes.append)  # type: ignore[arg-type]
        self.reports: list[tuple[float, str, bytes]] = []
        for router in self.cluster.routers:
            self._overhear(router.fleet.router_id, router.reported, router)
        self.cluster.run(requests)
        self.come_to_rest()

    def _overhear(self, router_id: str, reported: Callable[..., None], router: object) -> None:
        def overheard(worker: object, message: object) -> None:
            said = message.SerializeToString(deterministic=True)  # type: ignore[attr-defined]
            self.reports.append((self.cluster.clock.now, f"{router_id} {worker.worker_id}", said))  # type: ignore[attr-defined]
            reported(worker, message)

        router.reported = overheard  # type: ignore[attr-defined]

    def come_to_rest(self) -> None:
        """What was under way when the last request ended arrives."""
        until = self.cluster.clock.now + 1.0
        while self.cluster.clock.now < until and self.cluster.clock.step():
            pass
        self.cluster.links.check()

    @property
    def faults(self) -> list[str]:
        return audit(list(self.cluster.workers.values()))

    @property
    def summary(self) -> list[tuple[object, ...]]:
        """Of each request, all there is; to the bit."""
        ordered = sorted(self.outcomes, key=lambda outcome: outcome.request.number)
        return [dataclasses.astuple(outcome) for outcome in ordered]


def kills(names: Sequence[tuple[float, str]]) -> tuple[Failure, ...]:
    return tuple(Failure(at_s, name) for at_s, name in names)


def run_out(clock: VirtualClock) -> None:
    """Until nothing is left to happen."""
    while clock.step():
        pass
