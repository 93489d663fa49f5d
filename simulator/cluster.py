"""A cluster in virtual time: workers, routers, and what is between them."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engine.messages import CacheChanged, Load, Ready
from engine.worker.joining import cache_events, load_report
from protos import membership_pb2 as pb
from router.admission.config import AdmissionConfig
from router.fleet import Fleet
from router.rates import Priors
from simulator.clock import VirtualClock
from simulator.fronts import Fronts
from simulator.gaps import Gaps
from simulator.links import Links
from simulator.request import Outcome, TraceRequest
from simulator.router import SimRouter
from simulator.transport import VirtualTransport
from simulator.worker import SimWorker, WorkerSpec

START_S = 1.0
"""Before a trace begins: every router knows every worker by then."""
FleetMaker = Callable[[str, Priors, bool], Fleet]


def plain_fleet(router_id: str, priors: Priors, learn_rates: bool) -> Fleet:
    """Ours."""
    return Fleet(router_id, priors, learn_rates)


@dataclass(frozen=True, slots=True)
class Failure:
    """The machine of a worker loses its power."""

    at_s: float
    """Since the trace's beginning."""
    worker_id: str


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What a cluster is made of."""

    workers: tuple[tuple[str, WorkerSpec], ...]
    """By id."""
    priors: Priors
    """What placement assumes before it has learnt."""
    num_routers: int = 1
    message_s: float = 0.0005
    """From one process to another."""
    event_lag_s: float = 0.01
    """From an engine's word on its cache or load to the router that has heard it."""
    learn_rates: bool = True
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    make_fleet: FleetMaker = plain_fleet
    failures: tuple[Failure, ...] = ()
    skip: bool = True
    """Steps that are all alike happen at once; else each by itself, to the same results."""
    seed: int = 0
    """Of which router a request goes to."""


class SimCluster:
    """One run. Requests come from an iterator, read no further than they are needed."""

    def __init__(self, spec: ClusterSpec, on_end: Callable[[Outcome], object]) -> None:
        """`on_end` is called once for each request."""
        self.spec = spec
        self.clock = VirtualClock()
        self.links = Links(self.clock)
        self._on_end = on_end
        self._seeds = random.Random(spec.seed)
        self.gaps = Gaps()
        self.fronts = Fronts(self.clock, spec.message_s, self._report, self._count_gaps)
        self.workers = {
            worker_id: self._worker(worker_id, number, worker)
            for number, (worker_id, worker) in enumerate(spec.workers, start=1)
        }
        self.dead: list[SimWorker] = []
        self.routers = [self._router(number) for number in range(spec.num_routers)]
        self.num_under_way = 0
        for worker in self.workers.values():
            hello = hello_of(worker, worker.start())
            for router in self.routers:
                router.joined(worker, hello)
                router.reported(worker, pb.CacheEvents(snapshot=True))

    def run(self, trace: Iterable[TraceRequest], on_progress: Callable[[float], object] = lambda _: None) -> None:
        """Until every request has ended. `on_progress` hears the time since the trace's beginning with each arrival."""
        while self.clock.now < START_S:
            self.clock.step()
        for failure in self.spec.failures:
            self.clock.at(START_S + failure.at_s, self.kill, failure.worker_id)
        arrivals = iter(trace)
        self._arrive(arrivals, on_progress)
        while self.num_under_way:
            self.clock.step()

    def kill(self, worker_id: str) -> None:
        """Its machine has lost its power."""
        worker = self.workers.pop(worker_id)
        self.dead.append(worker)
        worker.kill()
        self.links.cut(worker_id)
        self.fronts.died(worker)
        for router in self.routers:
            self.clock.after(self.spec.message_s, router.left, worker)

    def _arrive(self, arrivals: Iterator[TraceRequest], on_progress: Callable[[float], object]) -> None:
        """The next request sets out at its time; it counts as under way from now, so that the run goes on."""
        request = next(arrivals, None)
        if request is not None:
            self.num_under_way += 1
            sent_at = max(START_S + request.arrival_s, self.clock.now)
            self.clock.at(sent_at, self._send, request, arrivals, on_progress)

    def _send(
        self, request: TraceRequest, arrivals: Iterator[TraceRequest], on_progress: Callable[[float], object]
    ) -> None:
        on_progress(request.arrival_s)
        outcome = Outcome(request, self.clock.now)
        router = self._seeds.choice(self.routers)
        self.clock.after(self.spec.message_s, router.submit, outcome, self._ended)
        self._arrive(arrivals, on_progress)

    def _ended(self, outcome: Outcome) -> None:
        assert outcome.fate is not None
        self.num_under_way -= 1
        self._on_end(outcome)

    def _count_gaps(self, times: Sequence[float], num_streams: int) -> None:
        """Of a run, as clients see them. Before the first is a gap for each stream, which its router counts."""
        to_client_s = 2 * self.spec.message_s
        for before, after in pairwise(times):
            self.gaps.add((after + to_client_s) - (before + to_client_s), num_streams)

    def _report(self, worker: SimWorker, message: CacheChanged | Load) -> None:
        said: pb.LoadReport | pb.CacheEvents
        said = load_report(message, draining=False) if isinstance(message, Load) else cache_events(message)
        for router in self.routers:
            self.clock.after(self.spec.event_lag_s, router.reported, worker, said)

    def _worker(self, worker_id: str, number: int, spec: WorkerSpec) -> SimWorker:
        self.links.add(worker_id, spec.nic_bytes_per_s)
        transport = VirtualTransport(self.clock, self.links, worker_id, spec.read_latency_s)
        return SimWorker(worker_id, number, spec, self.clock, transport, self.fronts, self.spec.skip)

    def _router(self, number: int) -> SimRouter:
        spec = self.spec
        fleet = spec.make_fleet(f"router-{number}", spec.priors, spec.learn_rates)
        return SimRouter(fleet, spec.admission, self.clock, self.fronts, spec.message_s, self.gaps)


def hello_of(worker: SimWorker, ready: Ready) -> pb.Hello:
    """What it says when it joins."""
    return pb.Hello(
        worker_id=worker.worker_id,
        incarnation=worker.worker_id.encode(),
        role=pb.ROLE_DECODE if worker.spec.role == "decode" else pb.ROLE_PREFILL,
        address=worker.worker_id,
        model="simulated",
        model_fingerprint=ready.model_fingerprint,
        block_tokens=ready.block_tokens,
        num_blocks=ready.num_blocks,
        block_bytes=ready.block_bytes,
        max_context_tokens=ready.max_context_tokens,
        transport=ready.transport,
        lends=True,
        reserve_output_tokens=worker.spec.limits.reserve_output_tokens,
    )


def audit(workers: Sequence[SimWorker]) -> list[str]:
    """What is wrong with the books of each, and what is held though nothing should be: nothing, after a run."""
    faults = []
    for worker in workers:
        audited = worker.core.audit()
        held = audited.held_blocks or audited.reserved_blocks or audited.sequences or audited.loans
        if audited.fault or held:
            faults.append(f"{worker.worker_id}: {audited.fault or audited}")
    return faults
