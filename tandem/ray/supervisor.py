"""Supervisor of a cluster's Ray actors: starts them, restarts those that die, scales, and restarts in turn."""

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.errors import StartError, TandemError, Unavailable
from cluster.network.tls import TlsIdentity, member_of
from cluster.process.life import Addresses
from cluster.process.tasks import Tasks, all_of, each_of, outcomes_of
from engine.config import WorkerConfig
from tandem.cluster_file import PREPROCESSOR, encoder_name, with_preprocessor
from tandem.members import workers_at
from tandem.progress import ProgressSteps
from tandem.ray.control import Order
from tandem.ray.placement_group import AT_ONCE_S, WorkerGroup
from tandem.ray.role_actor import Role
from tandem.ray.settings import RaySettings
from tandem.topology import MODULES, TOLD_NOTHING, Topology

JOIN_TIMEOUT_S, LOOK_FOR_IT_EVERY_S = 60.0, 0.1
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
"""First and longest wait before a restart, in seconds; it doubles each time."""
LOOK_EVERY_S = 10.0
"""Seconds between looks at the workers' roles, which any client may switch."""
LONG_ENOUGH_S = 60.0
"""Lifetime in seconds after which the next restart uses the first wait again."""


class SupervisorBackend:
    """Backend of a supervisor: Ray's actors and nodes, and routers' answers."""

    def role(self, *arguments: Any) -> Role:
        """Create a role; arguments as `Role` takes them."""
        return Role(*arguments)

    def several_hosts(self) -> bool:
        return len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}) > 1

    def here(self) -> Any:
        """Return the driver's node as a scheduling strategy."""
        return drivers_node()

    async def workers_at(self, router: str, trust: TlsIdentity | None) -> set[str]:
        """Return the addresses of serving workers as a router sees them.

        Raises ServiceError.
        """
        return await workers_at(router, trust, JOIN_TIMEOUT_S)


class Supervisor:
    """Supervisor of one cluster."""

    def __init__(
        self,
        topology: Topology,
        settings: RaySettings,
        say: ProgressSteps,
        autoscale: bool = False,
        ground: SupervisorBackend | None = None,
    ) -> None:
        """Create the supervisor.

        `autoscale`: place workers one by one, so that departing ones release their resources.
        """
        self._topology = topology
        self._routers = topology.routers
        """Settings of routers, with the preprocessor's address once that is known."""
        self._ground = ground or SupervisorBackend()
        workers = topology.workers()
        self._check(workers, autoscale)
        bundles = [module for module, config in workers for _ in range(config.nodes)]
        bundles += ["encode_worker"] * len(topology.encoders)
        self.group = WorkerGroup(settings, [] if autoscale else bundles)
        self._say = say
        self._several_hosts = self._ground.several_hosts()
        self._joined_at: tuple[str, ...] = ()
        """Addresses of the routers for workers."""
        self._trust = member_of(topology.router)
        self.roles: dict[str, Role] = {}
        self._tasks = Tasks()
        self._keeping: dict[Role, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._starting: list[Role] = []
        """Roles being started by an order."""
        self._order = asyncio.Lock()

    @staticmethod
    def _check(workers: Iterable[tuple[str, WorkerConfig]], autoscale: bool) -> None:
        """Raise StartError where the planner would size workers that only start and leave together."""
        for field in ("nodes", "data_parallel"):
            if autoscale and any(getattr(config, field) > 1 for _, config in workers):
                raise StartError(field, "--autoscale starts workers one by one, and these start together")

    # ------------------------------------------------------------------ starting

    async def start_media(self) -> list[str]:
        """Start encode workers, then the preprocessor on the driver's node; return like `start_workers`.

        Routers know the preprocessor by its address, which stays. Encode workers may come back elsewhere.

        Raises StartError.
        """
        if (config := self._topology.preprocessor) is None:
            return []
        await self.group.reserve(self._say)
        of_node = {"host": ""} if self._several_hosts else {}
        encoders = [
            self._role(encoder_name(number), "encode_worker", each, self.group.take("encode_worker"), of_node)
            for number, each in enumerate(self._topology.encoders)
        ]
        self.roles |= {role.name: role for role in encoders}
        started = await all_of(role.start() for role in encoders)
        if encoders:
            config = config.model_copy(update={"encoders": tuple(where.grpc for where in started)})
        options = {"num_cpus": 0, "scheduling_strategy": self._ground.here()}
        of_node = {"host": "", "advertise_host": ""} if self._several_hosts else {}
        role = self._role(PREPROCESSOR, "preprocessor", config, options, of_node)
        self.roles[role.name] = role
        where = await role.start()
        role.config = config.model_copy(update=_ports_of(where))
        self._routers = with_preprocessor(self._routers, where.grpc)
        named = zip([*encoders, role], [*started, where], strict=True)
        return [address for each, at in named if (address := _metrics_of(each, at))]

    async def start_routers(self) -> list[Addresses]:
        """Start routers on the driver's node, where clients know them; restarted ones keep their ports."""
        here, started = self._ground.here(), []
        for config in self._routers:
            options = {"num_cpus": 0, "scheduling_strategy": here}
            of_node = {"host": ""} if self._several_hosts and config.host == "127.0.0.1" else {}
            role = self._role(config.router_id or "router", "router", config, options, of_node)
            self.roles[role.name] = role
            where = await role.start()
            role.config = config.model_copy(update=_ports_of(where))
            started.append(where)
        self._joined_at = tuple(where.joined_at for where in started)
        return started

    async def start_workers(self) -> list[str]:
        """Start workers; return the names and metrics addresses of those that have any.

        Raises StartError.
        """
        if self._topology.preprocessor is None:
            await self.group.reserve(self._say)
        roles: list[Role] = []
        for module, config in self._topology.workers():
            role = self._worker(module, config)
            if config.data_parallel_rank:
                role.first = roles[-config.data_parallel_rank]
            roles.append(role)
        self.roles |= {role.name: role for role in roles}
        started = await all_of(role.start() for role in roles)
        return [address for role, where in zip(roles, started, strict=True) if (address := _metrics_of(role, where))]

    async def _start(self, role: Role) -> None:
        """Start or restart a role where there is room, and print where its metrics are.

        Returns early when its end is wanted.

        Raises StartError.
        """
        where = None
        while where is None:
            await self._find_room(role)
            if role.leaving:
                return
            where = await self._start_in_place(role)
        if role.module in ("encode_worker", "preprocessor"):
            await self._name_encoders()
        if address := _metrics_of(role, where):
            self._say(f"metrics at {address}")
            self._say.done()

    async def _name_encoders(self) -> None:
        """Tell the preprocessor where encode workers are, after one of these roles has started again."""
        encoders = [role.at for role in self.roles.values() if role.module == "encode_worker"]
        if encoders and (preprocessor := self.roles.get(PREPROCESSOR)) is not None:
            await preprocessor.set_encoders(tuple(encoders))

    async def _find_room(self, role: Role) -> None:
        """Wait for room for a role, or until its end is wanted."""
        reported = False
        while (options := await self.group.room(role.module, role.options)) is None and not role.leaving:
            if not reported:
                self._say(f"{role.name}: waiting for room on the Ray cluster")
            reported = True
        if options is None or options is role.options:
            return
        if role.leaving:
            self.group.give_back(options)
        else:
            self.group.give_back(role.options)
            role.options = options

    async def _start_in_place(self, role: Role) -> Addresses | None:
        """Start a role; return None when its place is lost meanwhile.

        Raises StartError.
        """
        async with Tasks() as tasks:
            starting = tasks.spawn(role.start())
            while not starting.done():
                await asyncio.wait([starting], timeout=AT_ONCE_S)
                if not starting.done() and not await self.group.has_place(role.options):
                    role.kill()
                    return None
            return starting.result()

    def _worker(self, module: str, config: WorkerConfig) -> Role:
        update: dict[str, Any] = {"routers": self._joined_at}
        of_node = {}
        if self._several_hosts:  # cores are this host's, and an address must be reachable from others
            update |= TOLD_NOTHING
            of_node = {"host": "", "advertise_host": ""}
            if config.data_parallel > 1 and not config.data_parallel_rank:
                of_node["data_parallel_address"] = ""
        config = config.model_copy(update=update)
        role = self._role(config.worker_id, module, config, self.group.take(module), of_node)
        role.further_nodes = [self.group.take(module) for _ in range(1, config.nodes)]
        return role

    def _role(self, *arguments: Any) -> Role:
        role = self._ground.role(*arguments)
        role.note = self._say.note
        return role

    # ------------------------------------------------------------------ keeping

    async def keep(self) -> None:
        """Restart roles that die.

        Returns when no role is left that should run.
        """
        for role in self.roles.values():
            self._keep(role)
        while self._keeping:
            self._changed.clear()
            async with Tasks() as tasks:
                ends = [tasks.spawn(self._changed.wait()), *self._keeping.values()]
                await asyncio.wait(ends, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            await self._look()  # a worker that dies starts again with its last role
            for role, task in list(self._keeping.items()):
                if task.done():
                    del self._keeping[role]
                    task.result()

    async def stop(self) -> None:
        await self._tasks.close()
        await each_of(role.stop() for role in self.roles.values())
        self.group.remove()

    def _keep(self, role: Role, cause: str = "") -> None:
        self._keeping[role] = self._tasks.spawn(self._keep_one(role, cause))
        self._changed.set()

    async def _keep_one(self, role: Role, cause: str = "") -> None:
        """Keep one role running until its end is wanted, or it was told to stop.

        `cause`: why it does not run now.
        """
        loop, wait_s = asyncio.get_running_loop(), FIRST_WAIT_S
        while True:
            if not cause:
                began_at = loop.time()
                cause = await role.ending()
                wait_s = FIRST_WAIT_S if loop.time() - began_at > LONG_ENOUGH_S else wait_s
            if not cause and not role.leaving:
                self.group.give_back(role.options)
            if role.leaving or not cause:
                break
            while cause and not role.leaving:
                log = f"; its log: {role.log}" if role.log else ""
                self._say(f"{role.name}: {cause}; starting it again in {wait_s:g} s{log}")
                role.kill()
                await asyncio.sleep(wait_s)
                wait_s = min(LONGEST_WAIT_S, 2 * wait_s)
                cause = await self._start_again(role)
            if role.leaving:
                break
            self._say(f"{role.name} runs again")
            self._say.done()
        if self.roles.get(role.name) is role:  # another of its name may have replaced it
            del self.roles[role.name]

    async def _start_again(self, role: Role) -> str:
        """Restart a role; return why it did not start, or empty."""
        if role.leaving:
            return ""
        try:
            await self._start(role)
        except StartError as error:
            return str(error)
        if role.leaving:  # its end was requested while it started
            role.kill()
        return ""

    # ------------------------------------------------------------------ orders

    async def perform(self, order: Order) -> list[str]:
        """Perform an order, one at a time; return what to tell of it.

        Raises TandemError saying why it is not done.
        """
        lines: list[str] = []
        async with self._order:
            if order.what == "scale":
                for role, count in order.counts.items():
                    lines += await self._scale(role, count, order.model)
            elif order.what == "restart":
                await self._restart()
            else:
                raise TandemError(f"unknown order {order.what}")
        return lines

    async def sizes(self, model: str) -> dict[str, int]:
        """Return the workers by role, including those being started."""
        await self._look()
        return {
            role: len(self._of_role(role, model)) + sum(each.module == MODULES[role] for each in self._starting)
            for role in MODULES
        }

    async def switch(self, names: Iterable[str], role: str) -> None:
        """Switch workers to `role`.

        Raises TandemError.
        """
        async with self._order:
            members = [self.roles[name] for name in names if name in self.roles]
            await each_of(each.switch(role) for each in members)
            self._say(f"{', '.join(each.name for each in members)}: {role} workers now")
            self._say.done()

    async def _scale(self, role: str, count: int, model: str) -> list[str]:
        """Add workers like the initial ones, or let the last ones leave; return how the new ones started."""
        if role not in MODULES or count < 0:
            raise TandemError(f"{role}={count}: must be {' or '.join(MODULES)}, and a number from 0")
        pattern, prefix = self._pattern(role, model)
        if max(pattern.nodes, pattern.data_parallel) > 1:
            raise TandemError(f"{role}: workers over several nodes, and data-parallel groups, have a fixed number here")
        await self._look()
        members = self._of_role(role, model)
        if role == "decode" and count == 0 and members:
            raise TandemError("decode=0: nothing would be served; tandem down ends the cluster")
        leaving, taken = members[count:], set(self.roles)
        await each_of(each.leave() for each in leaving)
        for each in leaving:
            self.group.give_back(each.options)
        free = (name for number in range(count + len(taken)) if (name := f"{prefix}{number}") not in taken)
        new = [
            self._worker(MODULES[role], pattern.model_copy(update={"worker_id": next(free)}))
            for _ in range(count - len(members))
        ]
        await self._add(new)
        self._say(f"{role}: {count} workers")
        self._say.done()
        return [f"{each.name}: started in {each.account}" for each in new]

    async def _add(self, roles: Iterable[Role]) -> None:
        """Start all roles, or as many as start; a failure is reported."""
        roles = list(roles)
        self._starting += roles
        try:
            outcomes = await outcomes_of(self._start(role) for role in roles)
        finally:
            self._starting = [role for role in self._starting if role not in roles]
        failures = []
        for role, outcome in zip(roles, outcomes, strict=True):
            if isinstance(outcome, Exception):
                failures.append(outcome)
                await role.stop()
                self.group.give_back(role.options)
            else:
                self.roles[role.name] = role
                self._keep(role)
        if failures:
            raise TandemError("; ".join(map(str, failures)))

    async def _restart(self) -> None:
        """Restart every worker in turn, a group at once, each only after the one before has joined again.

        The only worker of its role leaves when a successor has joined, where there are resources for two.
        """
        await self._look()
        workers = [role for role in self.roles.values() if role.is_worker]
        for role in workers:
            if role.leaving or self.roles.get(role.name) is not role:  # told to stop meanwhile
                continue
            if role.first is not None:  # restarted with the first of its group
                continue
            members = [role, *(each for each in workers if each.first is role)]
            if len(members) > 1 or role.further_nodes:
                await self._start_anew(members)
                continue
            alone = await self._is_alone(role)
            options = await self.group.spare(role.module) if alone else None
            if options is not None:
                await self._follow(role, options)
                continue
            if alone:
                self._say(f"{role.name}: no room for a replacement beside it; its work waits until it runs again")
            await self._start_anew([role])
        self._say(f"{len(workers)} workers restarted")
        self._say.done()

    async def _is_alone(self, role: Role) -> bool:
        """Return whether no other worker of its model and role serves."""
        serving = await self._ground.workers_at(self._joined_at[0], self._trust)
        others = (each for each in self.roles.values() if each is not role and each.module == role.module)
        return not any(each.at in serving and each.config.model == role.config.model for each in others)

    async def _follow(self, role: Role, options: dict[str, Any]) -> None:
        """Replace a role by a successor with a new name; `role` continues if that fails.

        Raises TandemError.
        """
        prefix = role.name.rpartition("-")[0]
        name = next(name for number in itertools.count() if (name := f"{prefix}-{number}") not in self.roles)
        config = role.config.model_copy(update={"worker_id": name})
        follower = self._role(name, role.module, config, options, role.of_node)
        await self._add([follower])
        try:
            await self._joined(follower)
        except TandemError:
            await follower.stop()
            self.group.give_back(follower.options)
            raise
        self._say(f"{role.name} is replaced by {name}")
        await role.leave()
        self.group.give_back(role.options)

    async def _start_anew(self, roles: Sequence[Role]) -> None:
        """Restart roles that only run together in their places after they have left, repeatedly if one does not start.

        Raises TandemError.
        """
        await each_of(role.leave() for role in roles)
        anew: list[Role] = []
        for role in roles:
            again = self._role(role.name, role.module, role.config, role.options, role.of_node)
            again.further_nodes = role.further_nodes
            again.first = anew[0] if anew else None
            anew.append(again)
        self._starting += anew
        outcomes = await outcomes_of(self._start(again) for again in anew)
        self._starting = [role for role in self._starting if role not in anew]
        causes: list[str] = []
        for again, outcome in zip(anew, outcomes, strict=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, StartError):
                raise outcome
            cause = "" if outcome is None else str(outcome)
            self.roles[again.name] = again
            self._keep(again, cause)
            causes += [cause] if cause else []
        if causes:
            raise TandemError(f"{'; '.join(causes)}; its start is tried again, and no further process is restarted")
        for again in anew:
            await self._joined(again)

    async def _joined(self, role: Role) -> None:
        """Wait until every router knows the role.

        Raises ServiceError.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + JOIN_TIMEOUT_S
        for router in self._joined_at:
            while role.at not in await self._ground.workers_at(router, self._trust):
                if loop.time() > give_up_at:
                    raise Unavailable(f"{role.name} has not joined the router at {router} within {JOIN_TIMEOUT_S:g} s")
                await asyncio.sleep(LOOK_FOR_IT_EVERY_S)

    async def _look(self) -> None:
        await each_of(role.look() for role in self.roles.values() if role.is_worker)

    def _of_role(self, role: str, model: str) -> list[Role]:
        """Return the roles of a model by present role, in order of their numbers."""
        prefixes = [prefix for each in MODULES for prefix in self._patterns(each, model)]
        roles: list[tuple[int, str, Role]] = []
        for each in self.roles.values():
            prefix, _, number = each.name.rpartition("-")
            if each.module == MODULES[role] and not each.leaving and f"{prefix}-" in prefixes and number.isdecimal():
                roles.append((int(number), each.name, each))
        return [each for _, _, each in sorted(roles, key=lambda entry: entry[:2])]

    def _pattern(self, role: str, model: str) -> tuple[WorkerConfig, str]:
        """Return a configuration for further workers, and the prefix of their names."""
        patterns = self._patterns(role, model)
        if len(patterns) != 1:
            known = ", ".join(prefix.removesuffix(f"-{role}-") for prefix in patterns) or "none"
            raise TandemError(f"{role}: name one of several models: {known}")
        ((prefix, config),) = patterns.items()
        return config, prefix

    def _patterns(self, role: str, model: str) -> dict[str, WorkerConfig]:
        """Return such configurations by name prefix, of one model or of all."""
        configs = self._topology.prefill if role == "prefill" else self._topology.decode
        patterns = {config.worker_id.rpartition("-")[0] + "-": config for config in configs}
        if model:
            patterns = {prefix: config for prefix, config in patterns.items() if prefix == f"{model}-{role}-"}
        return patterns


def drivers_node() -> Any:
    """Return a scheduling strategy for the driver's node, for actors that must not be lost with another node."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _metrics_of(role: Role, where: Addresses) -> str:
    """Return the line about a role's metrics; empty without any."""
    scheme = "https" if role.config.tls_cert else "http"
    return f"{scheme}://{where.metrics}/metrics ({role.name})" if where.metrics else ""


def _ports_of(where: Addresses) -> dict[str, int]:
    """Return ports as settings, so that a restarted role is found where it was."""
    named = {"port": where.grpc, "http_port": where.http, "metrics_port": where.metrics}
    named["internal_port"] = where.internal
    return {name: int(address.rpartition(":")[2]) for name, address in named.items() if address}
