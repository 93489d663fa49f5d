"""The planner's process: polls the routers, decides, exports the desired sizes and has them carried out, repeatedly."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge

from cluster.discovery.discovery import Discovery, Roster
from cluster.discovery.open_discovery import open_discovery
from cluster.errors import ServiceError, StartError, TandemError, Unavailable
from cluster.metrics import MetricsServer, new_registry
from cluster.network.error_status import from_rpc_error
from cluster.network.rpc import Server, channel
from cluster.network.tls import TlsIdentity, member_of
from cluster.process.life import Addresses, SignalledRole
from cluster.process.tasks import Tasks, all_of, failure_of, outcomes_of
from cluster.roles import ROLES, Role
from cluster.settings import DiscoverySettings, HealthSettings, HostSettings, LogSettings, MetricsSettings
from planner.config import PolicyConfig
from planner.estimates import Observation, Tallies, counters_of, observe
from planner.executors import Executor, ExecutorFailed, KubernetesConfig, KubernetesExecutor, NoExecutor, Switcher
from planner.policy import DesiredSizes, PolicyState, decide
from protos import inference_pb2 as public_pb
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)
ASK_S = 5.0
"""Seconds for a router to answer."""
BLIND_TURNS = 3
"""Rounds without any answer after which the planner is not ready."""


class PlannerConfig(HostSettings, HealthSettings, MetricsSettings, LogSettings, DiscoverySettings, PolicyConfig):
    """Settings of a planner, which sizes the pools of one model."""

    routers: tuple[str, ...] = ()
    """Addresses host:port where workers join routers, besides routers found in Redis."""
    model: str = ""
    """Model whose pools are sized; may be omitted where routers serve one."""
    kubernetes: KubernetesConfig | None = None
    """Pools on Kubernetes, which the planner scales. Unset, and without `switch`, desired sizes are metrics only. On
    Ray the planner is part of `tandem up --autoscale`."""

    def check(self) -> None:
        """Check settings against each other.

        Raises StartError.
        """
        super().check()
        if not self.routers and not self.redis_url:
            raise StartError("routers", "is empty: list routers, or set redis_url to find them")
        if self.kubernetes is not None and self.switch:
            raise StartError("switch", "must be unset with `kubernetes`: a pod cannot move between Deployments")


class PlannerMetrics:
    """Prometheus metrics of a planner."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model = model
        labels = ("model_name", "role")
        self._wanted = Gauge(
            "tandem_planner_wanted_workers", "Workers that the planner wants.", labels, registry=registry
        )
        self._serving = Gauge("tandem_planner_serving_workers", "Workers that serve.", labels, registry=registry)
        self._headroom = Gauge(
            "tandem_planner_headroom",
            "Headroom beyond the mean load, in units of its square root.",
            labels,
            registry=registry,
        )
        self._arrivals = Gauge(
            "tandem_planner_arrival_rate", "Requests per second, smoothed.", ("model_name",), registry=registry
        )
        self._switches = Counter(
            "tandem_planner_switches", "Workers told to switch to this role.", labels, registry=registry
        )
        self._failures = Counter(
            "tandem_planner_failures", "Failures of the planner, by the step that failed.", ("what",), registry=registry
        )
        for what in ("observe", "execute"):
            self._failures.labels(what)

    def decided(self, state: PolicyState, desired: DesiredSizes) -> None:
        for role in ROLES:
            self._wanted.labels(self._model, role).set(desired.pool(role))
            self._serving.labels(self._model, role).set(state.seen.pool(role).serving)
            self._headroom.labels(self._model, role).set(state.pool(role).headroom)
        self._arrivals.labels(self._model).set(state.learned.arrivals.level)

    def switched(self, role: Role, count: int) -> None:
        self._switches.labels(self._model, role).inc(count)

    def failed(self, what: str) -> None:
        self._failures.labels(what).inc()


class RouterPoller:
    """Poller of all routers."""

    def __init__(self, config: PlannerConfig, trust: TlsIdentity | None) -> None:
        self._config = config
        self._trust = trust
        self.roster = Roster(config.routers)
        self.answering: frozenset[str] = frozenset()
        self._tallies = Tallies()
        self.workers: Mapping[str, public_pb.WorkerStatus] = {}
        """Workers by id, from the latest answers."""

    async def look(self, now: float, sizes: Mapping[Role, int]) -> Observation:
        """Poll the routers and return an observation.

        Raises Unavailable when no router answers, and ServiceError for a model that none knows.
        """
        replies = await self._ask_all()
        statuses = [self._status(reply) for reply in replies]
        for reply, status in zip(replies, statuses, strict=True):
            counters = counters_of(status, self._config.ttft_s, self._config.itl_s)
            self._tallies.record(f"{reply.router_id}/{reply.incarnation.hex()}", counters)
        self.workers = {worker.worker_id: worker for status in statuses for worker in status.workers}
        seen = observe(now, statuses, {}, self._tallies.total)
        starting = {role: max(0, size - seen.pool(role).serving) for role, size in sizes.items()}
        return observe(now, statuses, starting, self._tallies.total)

    async def _ask_all(self) -> list[pb.LoadsReply]:
        addresses = sorted(self.roster.wanted)
        replies = await outcomes_of(map(self._ask, addresses))
        for address, reply in zip(addresses, replies, strict=True):
            if isinstance(reply, ServiceError):
                log.warning("router %s does not answer: %s", address, reply)
            elif isinstance(reply, Exception):
                raise reply
        answers = {
            address: reply
            for address, reply in zip(addresses, replies, strict=True)
            if not isinstance(reply, Exception)
        }
        self.answering = frozenset(answers)
        if not answers:
            raise Unavailable(f"none of {len(addresses)} routers answers")
        return list(answers.values())

    async def _ask(self, address: str) -> pb.LoadsReply:
        async with channel(address, self._trust) as link:
            try:
                reply: pb.LoadsReply = await pb_grpc.MembershipStub(link).Loads(pb.LoadsRequest(), timeout=ASK_S)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None
        return reply

    def _status(self, reply: pb.LoadsReply) -> public_pb.ModelStatus:
        named = [status for status in reply.models if self._config.model in ("", status.name)]
        if len(named) == 1:
            return named[0]
        known = ", ".join(status.name for status in reply.models)
        raise TandemError(f"model {self._config.model!r}: router {reply.router_id} serves {known}; name one of them")


class Planner(SignalledRole):
    """A started planner."""

    def __init__(
        self,
        config: PlannerConfig,
        executor: Executor,
        discovery: Discovery,
        metrics: MetricsServer,
        planner_metrics: PlannerMetrics,
        parts: AsyncExitStack,
    ) -> None:
        """Create the planner; `parts` holds what `stop` closes."""
        self.addresses = Addresses("", metrics=metrics.address)
        self._config = config
        self._executor = executor
        self._discovery = discovery
        self._parts = parts
        self._planner_metrics = planner_metrics
        self._watch = RouterPoller(config, member_of(config))
        self._state: PolicyState | None = None
        self._looked_at = -math.inf
        self._tasks = Tasks("the planner failed")
        self._running = self._tasks.spawn(all_of([self._follow(), self._run()]))

    def ready(self) -> bool:
        """Whether one of the last rounds saw the pools."""
        return time.monotonic() - self._looked_at <= BLIND_TURNS * self._config.every_s

    async def failed(self) -> TandemError:
        """Return only on a bug: no outside event ends a planner."""
        return TandemError(f"the planner failed: {await failure_of(self._running)!r}")

    async def drain(self) -> None:
        """Do nothing; there is no work to finish."""

    async def stop(self) -> None:
        await self._tasks.close()
        await self._parts.aclose()

    async def _follow(self) -> None:
        async for addresses in self._discovery.listings():
            self._watch.roster.listed(addresses, self._watch.answering)

    async def _run(self) -> None:
        while True:
            await self.run_round(time.monotonic())
            await asyncio.sleep(self._config.every_s)

    async def run_round(self, now: float) -> None:
        """Observe, decide and act once.

        Failures are logged, counted and retried in the next round.
        """
        try:
            seen = await self._watch.look(now, await self._executor.sizes())
        except TandemError as error:
            self._failed("observe", error)
            return
        self._looked_at = time.monotonic()
        before, policy = self._state, self._config
        if not self._executor.scales:
            num_serving = sum(seen.pool(role).serving for role in ROLES)
            policy = policy.model_copy(update={"max_total": max(1, num_serving)})
        self._state, desired = decide(before, seen, policy)
        self._planner_metrics.decided(self._state, desired)
        if before is None or (before.prefill.wanted, before.decode.wanted) != (desired.prefill, desired.decode):
            log.info("prefill %d, decode %d: %s", desired.prefill, desired.decode, _why(self._state))
        try:
            await self._act(desired, seen)
        except ExecutorFailed as error:
            self._failed("execute", error)

    async def _act(self, desired: DesiredSizes, seen: Observation) -> None:
        """Carry out every difference to the desired sizes, including earlier ones that failed."""
        for taker, giver in (ROLES, ROLES[::-1]):
            short = desired.pool(taker) - seen.pool(taker).serving - seen.pool(taker).starting
            spare = seen.pool(giver).serving + seen.pool(giver).starting - desired.pool(giver)
            if self._config.switch and self._executor.switches and min(short, spare) > 0:
                chosen = self._idlest(giver, min(short, spare))
                log.info("%s: switching to %s workers", ", ".join(worker.worker_id for worker in chosen), taker)
                await self._executor.switch(chosen, taker)
                self._planner_metrics.switched(taker, len(chosen))
        for role in ROLES:
            await self._executor.scale(role, desired.pool(role))

    def _idlest(self, role: Role, count: int) -> list[public_pb.WorkerStatus]:
        workers = [worker for worker in self._watch.workers.values() if worker.role == role and not worker.draining]
        return sorted(workers, key=lambda worker: (worker.running + worker.loans, worker.worker_id))[:count]

    def _failed(self, what: str, error: Exception) -> None:
        log.warning("%s: %s", what, error)
        self._planner_metrics.failed(what)


async def start_planner(config: PlannerConfig, executor: Executor | None = None) -> Planner:
    """Start the planner.

    Raises StartError.
    """
    config.check()
    executor = executor or _executor(config)
    async with AsyncExitStack() as parts:
        parts.push_async_callback(executor.close)
        metrics, registry = MetricsServer(config.host, config), new_registry()
        parts.push_async_callback(metrics.close)
        discovery = open_discovery(config.redis_url, config.cluster_name, config.routers)
        parts.push_async_callback(discovery.close)
        await discovery.start()
        await metrics.start(registry)
        health = None
        if config.health_port is not None:
            health = Server()
            await health.start(config.host, config.health_port, [], "health_port")
            parts.push_async_callback(health.stop, 0)
        planner_metrics = PlannerMetrics(registry, config.model)
        planner = Planner(config, executor, discovery, metrics, planner_metrics, parts.pop_all())
        if health is not None:
            await health.mark_serving(planner.ready)
        return planner


def _executor(config: PlannerConfig) -> Executor:
    if config.kubernetes is not None:
        return KubernetesExecutor(config.kubernetes)
    return Switcher(member_of(config)) if config.switch else NoExecutor()


def _why(state: PolicyState) -> str:
    """Return the reason of a decision, for logs."""
    seen, learned = state.seen, state.learned
    return (
        f"{learned.arrivals.level:.2f} requests/s, {learned.prefill_s.value:.2f} s of a prefill worker each;"
        f" {learned.running:.0f} streams; {seen.waiting} waiting with {seen.waiting_tokens} tokens"
    )
