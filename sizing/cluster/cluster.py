"""A cluster in virtual time: workers, routers, and the links between them."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from cluster.roles import ON_WIRE, Role
from engine.core_types import StepBudget
from engine.messages.from_engine import CacheChanged, LoadReport, Ready
from engine.messages.to_engine import SetBudget, TakeSnapshot
from loans.in_process import InProcessNetwork
from protos import membership_pb2 as pb
from router.admission.config import AdmissionConfig
from router.placement.fleet.fleet import Fleet
from router.placement.rates import Priors
from sizing.cluster.clock import VirtualClock
from sizing.cluster.front_processes import FrontProcesses
from sizing.cluster.links import Links
from sizing.cluster.router import MODEL, SimRouter
from sizing.cluster.store import NAME, StoreSpec, VirtualPlace, VirtualStore
from sizing.cluster.transport import VirtualTransport
from sizing.cluster.worker import SimWorker, WorkerSpec
from worker.front.lent_loans import empty
from worker.front.worker_events import cache_events, load_report
from workloads.request import Outcome, TraceRequest

START_S = 1.0
"""Seconds before a trace begins, within which every router learns every worker."""
DRAIN_S = 30.0
"""Default drain time of a worker, in seconds."""
FleetMaker = Callable[[str, Priors, bool], Fleet]


def plain_fleet(router_id: str, priors: Priors, learn_rates: bool) -> Fleet:
    """Return the fleet that real routers use."""
    return Fleet(router_id, priors, learn_rates)


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a worker's machine by loss of power."""

    at_s: float
    """Seconds since the trace's beginning."""
    worker_id: str


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Specification of a cluster."""

    workers: tuple[tuple[str, WorkerSpec], ...]
    """Workers by id."""
    priors: Priors
    """Speeds that placement assumes before it has learned."""
    num_routers: int = 1
    message_s: float = 0.0005
    """Seconds of a message from one process to another."""
    event_lag_s: float = 0.01
    """Seconds from an engine's report of cache or load to the router."""
    learn_rates: bool = True
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    make_fleet: FleetMaker = plain_fleet
    failures: tuple[Failure, ...] = ()
    skip: bool = True
    """Whether uniform decode steps happen at once; the results are the same."""
    seed: int = 0
    """Seed of the choice of a router for each request."""
    store: StoreSpec | None = None
    """Store that all workers share; they have one KV layout."""


@dataclass(slots=True)
class WorkerRental:
    """A worker's paid time, from its request until it has left, or for good if it dies.

    Seconds of the run's clock.
    """

    spec: WorkerSpec
    began_at: float
    ended_at: float | None = None


class SimCluster:
    """One run.

    Requests come from an iterator that is read only as far as needed.
    """

    def __init__(self, spec: ClusterSpec, on_end: Callable[[Outcome], object]) -> None:
        """Create the cluster; `on_end` is called once for each request."""
        self.spec = spec
        self.clock = VirtualClock()
        self.links = Links(self.clock)
        self._on_end = on_end
        self._seeds = random.Random(spec.seed)
        self.fronts = FrontProcesses(self.clock, spec.message_s, self._report)
        self._engines: dict[bytes, InProcessNetwork] = {}
        self._numbers = count(1)
        self.place: VirtualPlace | None = None
        if spec.store is not None:
            self.place = VirtualPlace(spec.store, spec.workers[0][1].layout)
            self.links.add(NAME, spec.store.bytes_per_s)
        self.hires: dict[str, WorkerRental] = {}
        self.workers = {worker_id: self._worker(worker_id, worker) for worker_id, worker in spec.workers}
        self.starting: dict[str, WorkerSpec] = {}
        """Workers that were asked for and do not serve yet."""
        self.leaving: set[str] = set()
        """Workers that drain."""
        self.gone: list[SimWorker] = []
        """Workers that died or left."""
        self.routers = [self._router(number) for number in range(spec.num_routers)]
        self.num_under_way = 0
        for worker in self.workers.values():
            hello = hello_of(worker, worker.start())
            for router in self.routers:
                router.joined(worker, hello)
                router.reported(worker, pb.WorkerMessage(cache=pb.CacheEvents(snapshot=True)))

    def run(self, trace: Iterable[TraceRequest], on_progress: Callable[[float], object] = lambda _: None) -> None:
        """Run until every request has ended.

        `on_progress` is called with the time since the trace's beginning at each arrival.
        """
        self.clock.run(lambda: self.clock.now < START_S)
        for failure in self.spec.failures:
            self.clock.at(max(START_S + failure.at_s, self.clock.now), self.kill, failure.worker_id)
        arrivals = iter(trace)
        self._arrive(arrivals, on_progress)
        assert self.clock.run(lambda: self.num_under_way), "requests wait for ever"

    def kill(self, worker_id: str) -> None:
        """Kill a worker by a loss of power, unless it is gone."""
        if (worker := self.workers.get(worker_id)) is not None:
            self._end(worker, self.spec.message_s)

    # ------------------------------------------------------------------ others than at the beginning

    def add(self, worker_id: str, spec: WorkerSpec, start_s: float) -> None:
        """Start one more worker, with a new id, that serves after `start_s` and is paid for from now."""
        self.starting[worker_id] = spec
        self.hires[worker_id] = WorkerRental(spec, self.clock.now)
        self.clock.after(start_s, self._arrived, worker_id)

    def remove(self, worker_id: str, drain_s: float = DRAIN_S) -> None:
        """Drain and remove a worker, or cancel its start."""
        if self.starting.pop(worker_id, None) is not None:
            self.hires[worker_id].ended_at = self.clock.now
        else:
            self._leave(self.workers[worker_id], drain_s, self._left)

    def switch(self, worker_id: str, role: Role, budget: StepBudget, switch_s: float, drain_s: float = DRAIN_S) -> None:
        """Switch a worker's role: it drains, and returns `switch_s` later with its cache."""
        self._leave(
            self.workers[worker_id],
            drain_s,
            lambda worker: self.clock.after(switch_s, self._turn_into, worker, role, budget),
        )

    def _leave(self, worker: SimWorker, drain_s: float, on_left: Callable[[SimWorker], object]) -> None:
        self.leaving.add(worker.worker_id)
        worker.requests.begin()
        worker.loans.begin()
        if worker.load is not None:
            self._report(worker, worker.load)  # now as draining
        self.clock.spawn(self._empty(worker, drain_s, on_left))

    async def _empty(self, worker: SimWorker, drain_s: float, on_left: Callable[[SimWorker], object]) -> None:
        await empty(worker.requests, worker.loans, drain_s, self.clock.time)
        if worker.alive:
            on_left(worker)

    def _left(self, worker: SimWorker) -> None:
        self.hires[worker.worker_id].ended_at = self.clock.now
        self._end(worker, self.spec.event_lag_s)

    def _arrived(self, worker_id: str) -> None:
        if (spec := self.starting.pop(worker_id, None)) is not None:
            worker = self.workers[worker_id] = self._worker(worker_id, spec)
            hello = hello_of(worker, worker.start())
            for router in self.routers:
                self.clock.after(self.spec.event_lag_s, self._join, router, worker, hello)
            worker.send(TakeSnapshot())

    def _turn_into(self, worker: SimWorker, role: Role, budget: StepBudget) -> None:
        """Change the role; earlier messages arrive before it has left, and its cache is sent again."""
        if not worker.alive:
            return
        self.leaving.discard(worker.worker_id)
        worker.role = role
        worker.requests.resume()
        worker.loans.resume()
        hello = hello_of(worker, worker.ready)
        for router in self.routers:
            self.clock.after(self.spec.event_lag_s, router.left, worker)
            self.clock.after(self.spec.event_lag_s, self._join, router, worker, hello)
        worker.send(SetBudget(budget), TakeSnapshot())

    def _join(self, router: SimRouter, worker: SimWorker, hello: pb.Hello) -> None:
        """Let a worker join a router, unless it died meanwhile."""
        if worker.alive:
            router.joined(worker, hello)

    def _end(self, worker: SimWorker, noticed_s: float) -> None:
        """End a worker; routers notice it `noticed_s` later."""
        del self.workers[worker.worker_id]
        self.leaving.discard(worker.worker_id)
        self.gone.append(worker)
        worker.kill()
        self.links.cut(worker.worker_id)
        self.fronts.died(worker)
        for router in self.routers:
            self.clock.after(noticed_s, router.left, worker)

    def _arrive(self, arrivals: Iterator[TraceRequest], on_progress: Callable[[float], object]) -> None:
        """Send the next request at its time; it counts as in flight from now, so that the run continues."""
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

    def _report(self, worker: SimWorker, message: CacheChanged | LoadReport) -> None:
        if isinstance(message, LoadReport):
            report = pb.WorkerMessage(load=load_report(message, worker.requests.draining))
        else:
            report = pb.WorkerMessage(cache=cache_events(message))
        for router in self.routers:
            self.clock.after(self.spec.event_lag_s, router.reported, worker, report)

    def _worker(self, worker_id: str, spec: WorkerSpec) -> SimWorker:
        self.links.add(worker_id, spec.nic_bytes_per_s)
        self.hires.setdefault(worker_id, WorkerRental(spec, self.clock.now))
        transport = VirtualTransport(self.clock, self.links, worker_id, spec.read_latency_s)
        store = None
        if self.place is not None:
            store = VirtualStore(self.place, worker_id, spec.layout, self.clock, self.links)
        number = next(self._numbers)
        return SimWorker(
            worker_id, number, spec, self.clock, transport, self._engines, self.spec.message_s, self.fronts,
            self.spec.skip, store,
        )  # fmt: skip

    def _router(self, number: int) -> SimRouter:
        spec = self.spec
        fleet = spec.make_fleet(f"router-{number}", spec.priors, spec.learn_rates)
        return SimRouter(fleet, spec.admission, self.clock, self.fronts, spec.workers[0][1].max_context_tokens)


def hello_of(worker: SimWorker, ready: Ready) -> pb.Hello:
    """Return the Hello with which a worker joins."""
    return pb.Hello(
        worker_id=worker.worker_id,
        incarnation=worker.worker_id.encode(),
        role=ON_WIRE[worker.role],
        address=worker.worker_id,
        model=MODEL,
        config_fingerprint=MODEL.encode(),
        model_fingerprint=ready.model_fingerprint,
        block_tokens=ready.block_tokens,
        num_blocks=ready.num_blocks,
        block_bytes=ready.block_bytes,
        max_context_tokens=ready.max_context_tokens,
        transport=ready.transport,
        lends=True,
        loan_address=ready.loan_address,
        reserve_output_tokens=worker.spec.limits.reserve_output_tokens,
        store=ready.store,
    )


def audit(workers: Sequence[SimWorker]) -> list[str]:
    """Return faults in each worker's records, and blocks still held; after a run there are none."""
    faults = []
    for worker in workers:
        audited = worker.core.audit()
        held = audited.held_blocks or audited.reserved_blocks or audited.sequences or audited.loans
        if audited.fault or held:
            faults.append(f"{worker.worker_id}: {audited.fault or audited}")
    return faults
