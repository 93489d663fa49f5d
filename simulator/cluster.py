"""A cluster in virtual time: workers, routers, and what is between them."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from cluster.roles import ON_WIRE, Role
from engine.core.scheduler import StepBudget
from engine.messages import CacheChanged, Load, Ready, SetBudget, TakeSnapshot
from engine.worker.worker_events import cache_events, load_report
from protos import membership_pb2 as pb
from router.admission.config import AdmissionConfig
from router.placement.fleet import Fleet
from router.placement.rates import Priors
from simulator.clock import VirtualClock
from simulator.front_processes import FrontProcesses
from simulator.latency_histogram import LatencyHistogram
from simulator.links import Links
from simulator.request import Outcome, TraceRequest
from simulator.router import SimRouter
from simulator.transport import VirtualTransport
from simulator.worker import SimWorker, WorkerSpec
from simulator.worker_drain import DRAIN_S, WorkerDrain

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


@dataclass(slots=True)
class WorkerRental:
    """A worker's time, paid for from the moment it is asked for until it has left, and for good where it dies. Seconds
    of the run's clock."""

    spec: WorkerSpec
    began_at: float
    ended_at: float | None = None


class SimCluster:
    """One run. Requests come from an iterator, read no further than they are needed."""

    def __init__(self, spec: ClusterSpec, on_end: Callable[[Outcome], object]) -> None:
        """`on_end` is called once for each request."""
        self.spec = spec
        self.clock = VirtualClock()
        self.links = Links(self.clock)
        self._on_end = on_end
        self._seeds = random.Random(spec.seed)
        self.gaps = LatencyHistogram()
        self._loads = _Loads()
        self.fronts = FrontProcesses(self.clock, spec.message_s, self._report, self._count_gaps)
        self._numbers = count(1)
        self.hires: dict[str, WorkerRental] = {}
        self.workers = {worker_id: self._worker(worker_id, worker) for worker_id, worker in spec.workers}
        self.starting: dict[str, WorkerSpec] = {}
        """Asked for, and not there yet."""
        self.leaving: dict[str, WorkerDrain] = {}
        self.gone: list[SimWorker] = []
        """Dead, or left."""
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
            self.clock.at(max(START_S + failure.at_s, self.clock.now), self.kill, failure.worker_id)
        arrivals = iter(trace)
        self._arrive(arrivals, on_progress)
        while self.num_under_way:
            self.clock.step()

    def kill(self, worker_id: str) -> None:
        """Its machine has lost its power, unless it is gone."""
        if (worker := self.workers.get(worker_id)) is not None:
            self._end(worker, self.spec.message_s)

    # ------------------------------------------------------------------ others than at the beginning

    def add(self, worker_id: str, spec: WorkerSpec, start_s: float) -> None:
        """One more worker, of an id that none ever had, which serves after `start_s`; it is paid for from now."""
        self.starting[worker_id] = spec
        self.hires[worker_id] = WorkerRental(spec, self.clock.now)
        self.clock.after(start_s, self._arrived, worker_id)

    def remove(self, worker_id: str, drain_s: float = DRAIN_S) -> None:
        """It takes nothing more, finishes or hands over what it has, and goes; or does not come at all."""
        if self.starting.pop(worker_id, None) is not None:
            self.hires[worker_id].ended_at = self.clock.now
        else:
            self._leave(self.workers[worker_id], drain_s, self._left)

    def switch(self, worker_id: str, role: Role, budget: StepBudget, switch_s: float, drain_s: float = DRAIN_S) -> None:
        """It leaves as it would for good, and is back `switch_s` after that in another role, with its cache."""
        self._leave(
            self.workers[worker_id],
            drain_s,
            lambda worker: self.clock.after(switch_s, self._turn_into, worker, role, budget),
        )

    def _leave(self, worker: SimWorker, drain_s: float, on_left: Callable[[SimWorker], object]) -> None:
        worker.draining = True
        for router in self.routers:
            self.clock.after(self.spec.event_lag_s, router.drains, worker)
        self.leaving[worker.worker_id] = WorkerDrain(worker, self.fronts, self.clock, drain_s, on_left)

    def _left(self, worker: SimWorker) -> None:
        self.hires[worker.worker_id].ended_at = self.clock.now
        self._end(worker, self.spec.event_lag_s)

    def _arrived(self, worker_id: str) -> None:
        if (spec := self.starting.pop(worker_id, None)) is not None:
            worker = self.workers[worker_id] = self._worker(worker_id, spec)
            hello = hello_of(worker, worker.start())
            for router in self.routers:
                self.clock.after(self.spec.event_lag_s, self._join, router, worker, hello)
            worker.tell(TakeSnapshot())

    def _turn_into(self, worker: SimWorker, role: Role, budget: StepBudget) -> None:
        """What it said before is heard before it has left; what its cache holds is said anew."""
        if not worker.alive:
            return
        del self.leaving[worker.worker_id]
        worker.role, worker.draining = role, False
        hello = hello_of(worker, worker.ready)
        for router in self.routers:
            self.clock.after(self.spec.event_lag_s, router.left, worker)
            self.clock.after(self.spec.event_lag_s, self._join, router, worker, hello)
        worker.tell(SetBudget(budget), TakeSnapshot())

    def _join(self, router: SimRouter, worker: SimWorker, hello: pb.Hello) -> None:
        """Unless it died on the way."""
        if worker.alive:
            router.joined(worker, hello)

    def _end(self, worker: SimWorker, noticed_s: float) -> None:
        """It is no more; routers know so long after."""
        del self.workers[worker.worker_id]
        if (leaving := self.leaving.pop(worker.worker_id, None)) is not None:
            leaving.cancel()
        self.gone.append(worker)
        worker.kill()
        self.links.cut(worker.worker_id)
        self.fronts.died(worker)
        for router in self.routers:
            self.clock.after(noticed_s, router.left, worker)

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
        assert outcome.end_state is not None
        self.num_under_way -= 1
        self._on_end(outcome)

    def _count_gaps(self, times: Sequence[float], num_streams: int) -> None:
        """Of a run, as clients see them. Before the first is a gap for each stream, which its router counts."""
        to_client_s = 2 * self.spec.message_s
        for before, after in pairwise(times):
            self.gaps.add((after + to_client_s) - (before + to_client_s), num_streams)

    def _report(self, worker: SimWorker, message: CacheChanged | Load) -> None:
        said: pb.LoadReport | pb.CacheEvents
        said = self._loads.of(worker, message) if isinstance(message, Load) else cache_events(message)
        for router in self.routers:
            self.clock.after(self.spec.event_lag_s, router.reported, worker, said)

    def _worker(self, worker_id: str, spec: WorkerSpec) -> SimWorker:
        self.links.add(worker_id, spec.nic_bytes_per_s)
        self.hires.setdefault(worker_id, WorkerRental(spec, self.clock.now))
        transport = VirtualTransport(self.clock, self.links, worker_id, spec.read_latency_s)
        return SimWorker(worker_id, next(self._numbers), spec, self.clock, transport, self.fronts, self.spec.skip)

    def _router(self, number: int) -> SimRouter:
        spec = self.spec
        fleet = spec.make_fleet(f"router-{number}", spec.priors, spec.learn_rates)
        return SimRouter(fleet, spec.admission, self.clock, self.fronts, spec.message_s, self.gaps)


class _Loads:
    """What workers report of their load, made once for as long as it stays the same."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Load, bool, pb.LoadReport]] = {}

    def of(self, worker: SimWorker, load: Load) -> pb.LoadReport:
        last = self._last.get(worker.worker_id)
        if last is not None and last[0] == load and last[1] == worker.draining:
            return last[2]
        said = load_report(load, worker.draining)
        self._last[worker.worker_id] = load, worker.draining, said
        return said


def hello_of(worker: SimWorker, ready: Ready) -> pb.Hello:
    """What it says when it joins."""
    return pb.Hello(
        worker_id=worker.worker_id,
        incarnation=worker.worker_id.encode(),
        role=ON_WIRE[worker.role],
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
