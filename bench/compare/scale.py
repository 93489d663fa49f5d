"""Scale by simulation: 16 to 1,024 workers in virtual time, with the router's own code.

The conversation trace at half a request per second and worker, Llama 3.1 8B on an H100 each. How stale events and
several routers change the hit rate is seen with 128 workers.
"""

import json
import time
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from bench.advice import H100, LLAMA, mooncake
from bench.report import percentile
from protos import membership_pb2 as pb
from router.placement.demand import Demand
from router.placement.fleet import Fleet
from router.placement.place import Decision
from router.placement.rates import Priors
from router.placement.worker_records import Worker
from simulator.cluster import START_S, SimCluster
from simulator.replay import Scenario, Setup, cluster_spec
from simulator.results import ResultCounter, Slo

SIZES = (16, 128, 1024)
MIDDLE = 128
RATE_PER_WORKER, REQUESTS_PER_WORKER, MOST_REQUESTS = 0.5, 16, 4000
LAGS_S, ROUTERS = (0.1, 1.0, 10.0), (2, 4)
BYTES_PER_BLOCK = 104
"""Memory of a block in the index, by `make bench-router`."""
SLO = Slo(5.0, 0.1)


class TimedFleet(Fleet):
    """Fleet that notes how long its decisions and its updates took."""

    def __init__(self, router_id: str, priors: Priors, learn_rates: bool, times: "Times") -> None:
        super().__init__(router_id, priors, learn_rates)
        self._times = times
        times.fleets.append(self)

    def decide(self, demand: Demand, keys: Any, available: Any = None) -> Decision | None:
        began_at = time.perf_counter()
        found = super().decide(demand, keys, available)
        self._times.decisions_s.append(time.perf_counter() - began_at)
        return found

    def cache_changed(self, worker: Worker, changed: pb.CacheEvents) -> bool:
        began_at = time.perf_counter()
        in_step = super().cache_changed(worker, changed)
        self._times.events_s += time.perf_counter() - began_at
        self._times.num_keys += sum(len(event.stored) + len(event.removed) for event in changed.events) // 16
        return in_step


class Times:
    """Times of all routers of one run."""

    def __init__(self) -> None:
        self.fleets: list[TimedFleet] = []
        self.decisions_s: list[float] = []
        self.events_s = 0.0
        self.num_keys = 0


def run(workers: int, lag_s: float = 0.01, routers: int = 1) -> dict[str, Any]:
    """Return figures of one run."""
    times = Times()
    setup = Setup(LLAMA, H100, workers, slo=SLO, num_routers=routers, event_lag_s=lag_s)
    spec = cluster_spec(setup, Scenario("aggregated", 0, workers))
    pools = tuple((name, replace(worker, num_blocks=4000)) for name, worker in spec.workers)
    tally = ResultCounter(setup.slo, START_S)
    make = partial(TimedFleet, times=times)
    cluster = SimCluster(replace(spec, workers=pools, make_fleet=make), tally.add)
    requests = min(workers * REQUESTS_PER_WORKER, MOST_REQUESTS)
    began_at = time.perf_counter()
    cluster.run(mooncake(RATE_PER_WORKER * workers, requests)(0))
    took_s = time.perf_counter() - began_at
    results = tally.results(cluster.gaps, 1.0, 1.0, 1.0)
    blocks = max(fleet.num_indexed_blocks for fleet in times.fleets)
    return {
        "workers": workers,
        "routers": routers,
        "lag_s": lag_s,
        "requests": results.requests,
        "finished": results.finished,
        "hit_rate": results.hit_rate,
        "ttft_mean_s": results.ttft_s.mean,
        "ttft_p99_s": results.ttft_s.p99,
        "decision_p50_ms": 1e3 * percentile(times.decisions_s, 0.5),
        "decision_p99_ms": 1e3 * percentile(times.decisions_s, 0.99),
        "decisions_per_core_s": len(times.decisions_s) / sum(times.decisions_s),
        "keys_per_core_s": times.num_keys / times.events_s if times.events_s else 0.0,
        "keys_per_request": times.num_keys / results.requests,
        "index_blocks": blocks,
        "index_mib": blocks * BYTES_PER_BLOCK / (1 << 20),
        "took_s": took_s,
    }


def measure(console: Console) -> list[dict[str, Any]]:
    cases = [(size, 0.01, 1) for size in SIZES]
    cases += [(MIDDLE, lag_s, 1) for lag_s in LAGS_S] + [(MIDDLE, 0.01, routers) for routers in ROUTERS]
    figures = []
    for case in cases:
        figures.append(run(*case))
        console.print(json.dumps(figures[-1]))
    return figures


if __name__ == "__main__":
    measure(Console(width=160))
