"""The planner in virtual time: the policy of live clusters, and an executor for simulated workers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.roles import ROLES, Role
from planner.config import PolicyConfig
from planner.estimates import Tallies, counters_of, observe
from planner.policy import DesiredSizes, PolicyState, decide
from router.membership.status import load_status
from sizing.cluster.cluster import START_S, SimCluster
from sizing.cluster.worker import SimWorker, WorkerSpec

MODEL = "simulated"
JOIN_S = 0.5
"""Seconds between two roles, during which a worker belongs to no pool."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of workers at one moment."""

    at_s: float
    """Seconds since the trace's beginning."""
    prefill: int
    """Prefill workers that serve or drain."""
    decode: int
    starting: int
    wanted_prefill: int
    wanted_decode: int


@dataclass(frozen=True, slots=True)
class Autoscale:
    """Settings of a cluster's planner during a trace."""

    policy: PolicyConfig


@dataclass(slots=True)
class Autoscaler:
    """Planner of one run."""

    cluster: SimCluster
    settings: Autoscale
    spec_of: Callable[[Role], WorkerSpec]
    """Function that returns the spec of a new worker."""
    sizes: list[Sizes] = field(default_factory=list)
    _state: PolicyState | None = None
    _tallies: Tallies = field(default_factory=Tallies)
    _roles: dict[str, Role] = field(default_factory=dict)
    """Future roles of workers that are switching."""
    _numbers: dict[Role, int] = field(default_factory=dict)

    def begin(self) -> None:
        """Start, before the cluster runs."""
        for role in ROLES:
            self._numbers[role] = sum(worker.role == role for worker in self.cluster.workers.values())
        self.cluster.clock.at(START_S, self._run_round)

    def _run_round(self) -> None:
        cluster, policy = self.cluster, self.settings.policy
        now = cluster.clock.now
        statuses = [load_status(MODEL, router.fleet, router.admission) for router in cluster.routers]
        for router, status in zip(cluster.routers, statuses, strict=True):
            self._tallies.record(router.fleet.router_id, counters_of(status, policy.ttft_s, policy.itl_s))
        seen = observe(now, statuses, {role: self._on_their_way(role) for role in ROLES}, self._tallies.total)
        self._state, desired = decide(self._state, seen, policy)
        self._perform(desired)
        self._note(desired)
        cluster.clock.after(policy.every_s, self._run_round)

    def _on_their_way(self, role: Role) -> int:
        """Return the workers of a role that are starting or switching."""
        cluster = self.cluster
        fresh = sum(spec.role == role for spec in cluster.starting.values())
        return fresh + sum(self._roles.get(worker_id) == role for worker_id in cluster.leaving)

    def _perform(self, desired: DesiredSizes) -> None:
        for giver, taker, switching in (
            ("decode", "prefill", desired.to_prefill),
            ("prefill", "decode", desired.to_decode),
        ):
            for worker in self._staying("decode" if giver == "decode" else "prefill")[:switching]:
                self._switch(worker, "decode" if taker == "decode" else "prefill")
        for role in ROLES:
            self._size(role, desired.pool(role))

    def _switch(self, worker: SimWorker, role: Role) -> None:
        self._roles[worker.worker_id] = role
        self.cluster.switch(worker.worker_id, role, self.spec_of(role).limits.budget, JOIN_S)

    def _size(self, role: Role, wanted: int) -> None:
        cluster = self.cluster
        surplus = len(self._staying(role)) + self._on_their_way(role) - wanted
        for _ in range(-surplus):
            worker_id = f"{role}-{self._numbers[role]:04}"
            self._numbers[role] += 1
            cluster.add(worker_id, self.spec_of(role), self.settings.policy.start_s)
        latest = [worker_id for worker_id, spec in cluster.starting.items() if spec.role == role][::-1]
        victims = [*latest, *(worker.worker_id for worker in self._staying(role))]
        for worker_id in victims[: max(0, surplus)]:
            cluster.remove(worker_id)

    def _staying(self, role: Role) -> Sequence[SimWorker]:
        """Return the workers in the order in which they should leave: fewest requests and loans, then youngest."""
        cluster = self.cluster
        workers = [
            worker for worker in cluster.workers.values() if worker.role == role and not worker.requests.draining
        ]
        workers.reverse()
        return sorted(workers, key=lambda w: w.requests.num_calls + w.network.num_given)

    def _note(self, desired: DesiredSizes) -> None:
        cluster = self.cluster
        counts = {role: sum(worker.role == role for worker in cluster.workers.values()) for role in ROLES}
        at_s = cluster.clock.now - START_S
        sizes = counts["prefill"], counts["decode"], len(cluster.starting)
        self.sizes.append(Sizes(at_s, *sizes, desired.prefill, desired.decode))
