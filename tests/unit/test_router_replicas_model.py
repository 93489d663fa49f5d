"""Three routers over the same workers, whose reports and whose placements arrive late: nobody counts a placement twice,
and once all has arrived, all know the same."""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protos import membership_pb2 as pb
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import ActivePlacement, WorkerRecord
from router.placement.rates import Priors

ROUTERS = ["r0", "r1", "r2"]
DECODES, PREFILLS = ["d0", "d1"], ["p0"]
NUM_BLOCKS = 1000
DEMAND = Demand(9, 4, 6, 2, 100, (9,), 12)
PRIORS = Priors(1000, 10, 1e6, 0.001, 0.001, 0.001)


@dataclass(eq=False)
class Request:
    """One placement, as everybody sees it at his own time."""

    router: str
    placed: ActivePlacement
    arrived: bool = False
    """At its decode worker."""
    wanted: bool = False
    """At its lender."""
    over: bool = False
    """At the router, and told to its workers with the same delay."""


@dataclass(eq=False)
class ModelWorker:
    """What a worker really has."""

    name: str
    running: list[Request] = field(default_factory=list)
    lending: list[Request] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    arriving: dict[str, deque[tuple[str, Request]]] = field(default_factory=lambda: {r: deque() for r in ROUTERS})
    """From each router, in order."""
    reports: dict[str, deque[tuple[pb.LoadReport, frozenset[Request]]]] = field(
        default_factory=lambda: {r: deque() for r in ROUTERS}
    )
    """To each router, in order; with the requests that each counts."""
    told: dict[str, frozenset[Request]] = field(default_factory=dict)
    """Those of the last one that arrived."""

    def report(self) -> pb.LoadReport:
        return pb.LoadReport(
            running=len(self.running),
            queued_prefill_tokens=sum(request.placed.lender_tokens for request in self.lending),
            available_blocks=NUM_BLOCKS - 6 * len(self.running),
            num_blocks=NUM_BLOCKS,
            placements_seen=self.seen,
        )

    def saw(self, request: Request) -> None:
        # Every mark is of a router's own incarnation, as the fleets draw it here from their names.
        mark = f"{request.router}/{request.router}"
        self.seen[mark] = max(self.seen.get(mark, 0), request.placed.sequence)


class Replicas(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fleets = {name: Fleet(name, PRIORS, learn_rates=False, incarnation=name) for name in ROUTERS}
        self.workers = {name: ModelWorker(name) for name in [*DECODES, *PREFILLS]}
        self.members: dict[tuple[str, str], WorkerRecord] = {}
        for router, fleet in self.fleets.items():
            for name, worker in self.workers.items():
                role = pb.ROLE_DECODE if name in DECODES else pb.ROLE_PREFILL
                hello = pb.Hello(worker_id=name, role=role, model_fingerprint=b"model", num_blocks=NUM_BLOCKS)
                self.members[router, name] = fleet.joined(hello)
                fleet.reported(self.members[router, name], worker.report())
                worker.told[router] = frozenset()
        self.requests: list[Request] = []

    @rule(router=st.sampled_from(ROUTERS))
    def place(self, router: str) -> None:
        fleet = self.fleets[router]
        decision = fleet.decide(DEMAND, [])
        if decision is None:
            return
        request = Request(router, fleet.placed(decision, DEMAND, []))
        self.requests.append(request)
        self.workers[decision.decode_id].arriving[router].append(("generate", request))
        if decision.lender_id is not None:
            self.workers[decision.lender_id].arriving[router].append(("want", request))

    @rule(worker=st.sampled_from([*DECODES, *PREFILLS]), router=st.sampled_from(ROUTERS))
    def arrive(self, worker: str, router: str) -> None:
        """The next thing that the router, or its decode worker for it, has sent there."""
        there = self.workers[worker]
        if not there.arriving[router]:
            return
        what, request = there.arriving[router].popleft()
        match what:
            case "generate":
                there.saw(request)
                request.arrived = True
                there.running.append(request)
            case "want":
                there.saw(request)
                request.wanted = True
                there.lending.append(request)
            case "cancel":
                for under_way in (there.running, there.lending):
                    if request in under_way:
                        under_way.remove(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if request.arrived and not request.over:
            self.fleets[request.router].started(request.placed)
            lender = request.placed.lender
            if lender is not None and request in (lending := self.workers[lender.worker_id].lending):
                lending.remove(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """By whatever: a finish, a client that goes, a failure. Its streams tell the workers."""
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        request.over = True
        self.fleets[request.router].ended(request.placed)
        for member in (request.placed.decode, request.placed.lender):
            if member is not None:
                self.workers[member.worker_id].arriving[request.router].append(("cancel", request))

    @rule(worker=st.sampled_from([*DECODES, *PREFILLS]))
    def report(self, worker: str) -> None:
        there = self.workers[worker]
        for router in ROUTERS:
            there.reports[router].append((there.report(), frozenset(there.running)))

    @rule(worker=st.sampled_from([*DECODES, *PREFILLS]), router=st.sampled_from(ROUTERS))
    def receive(self, worker: str, router: str) -> None:
        reports = self.workers[worker].reports[router]
        if reports:
            load, counted = reports.popleft()
            self.fleets[router].reported(self.members[router, worker], load)
            self.workers[worker].told[router] = counted

    @invariant()
    def own_placements_count_once(self) -> None:
        """In the last report or beside it, never both and never in neither."""
        for router, fleet in self.fleets.items():
            views = {view.worker_id: view for view in fleet.views()}
            for name in DECODES:
                told = self.workers[name].told[router]
                own = {r for r in self.requests if r.router == router and r.placed.decode.worker_id == name}
                # Of those that are over, what the report still counts; of others', what it counted.
                assert views[name].running == len(told | own)
                assert views[name].available_blocks == NUM_BLOCKS - 6 * len(told | own)

    def settle(self) -> None:
        for name, worker in self.workers.items():
            for router in ROUTERS:
                while worker.arriving[router]:
                    self.arrive(name, router)
        for name, worker in self.workers.items():
            self.report(name)
            for router in ROUTERS:
                while worker.reports[router]:
                    self.receive(name, router)

    def agree(self) -> None:
        for fleet in self.fleets.values():
            for view in fleet.views():
                worker = self.workers[view.worker_id]
                assert view.running == len(worker.running)
                assert view.available_blocks == NUM_BLOCKS - 6 * len(worker.running)
                assert view.queued_prefill_tokens == sum(r.placed.lender_tokens for r in worker.lending)

    def teardown(self) -> None:
        """Everything arrives: all routers know what the workers have. Everything ends: nobody has anything."""
        self.settle()
        self.agree()
        for request in list(self.requests):
            self.requests.remove(request)
            self.fleets[request.router].ended(request.placed)
            for member in (request.placed.decode, request.placed.lender):
                if member is not None:
                    self.workers[member.worker_id].arriving[request.router].append(("cancel", request))
        self.settle()
        self.agree()
        assert not any(worker.running or worker.lending for worker in self.workers.values())
        assert all(view.running == 0 for fleet in self.fleets.values() for view in fleet.views())


TestReplicas = Replicas.TestCase


def test_a_router_that_restarts_under_its_name_counts_anew() -> None:
    """What its predecessor placed does not make its own first placements seen."""
    before = Fleet("r0", PRIORS, incarnation="1")
    after = Fleet("r0", PRIORS, incarnation="2")
    assert before.mark != after.mark
    member = after.joined(pb.Hello(worker_id="d0", role=pb.ROLE_DECODE, model_fingerprint=b"m", num_blocks=NUM_BLOCKS))
    idle = pb.LoadReport(available_blocks=NUM_BLOCKS, num_blocks=NUM_BLOCKS, placements_seen={before.mark: 1000})
    after.reported(member, idle)
    decision = after.decide(DEMAND, [])
    assert decision is not None
    after.placed(decision, DEMAND, [])
    after.reported(member, idle)
    assert [view.running for view in after.views()] == [1]
