"""The supervisor of `tandem up`, on actors of virtual time instead of Ray's: restarts in turn, back-off, switches."""

import asyncio
import io
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import pytest
from rich.console import Console

from cluster.errors import StartError, TandemError
from cluster.network.tls import TlsIdentity
from cluster.process.life import Addresses
from planner.executors import ExecutorFailed
from protos import inference_pb2 as pb
from tandem.cluster_file import plan_media
from tandem.progress import ProgressSteps
from tandem.ray.control import Order
from tandem.ray.placement_group import AT_ONCE_S, WorkerGroup
from tandem.ray.pool_executor import RayExecutor, planner_config
from tandem.ray.role_actor import Role
from tandem.ray.settings import RaySettings
from tandem.ray.supervisor import JOIN_TIMEOUT_S, LONG_ENOUGH_S, LONGEST_WAIT_S, Supervisor, SupervisorBackend
from tandem.topology import MODULES, ClusterModel, Topology, plan_models, plan_topology

LOAD_S = 100.0
"""Of a model: longer than a router lets requests wait for a worker."""
JOIN_S = 2.0
RESTART = Order(1, "restart")


class Actor(Role):
    """Serves after `LOAD_S`, and has joined `JOIN_S` later."""

    def __init__(self, machine: "Machine", *arguments: Any) -> None:
        super().__init__(*arguments)
        self._machine = machine
        self._ended = asyncio.get_running_loop().create_future()

    async def start(self) -> Addresses:
        self._machine.tell("starts", self.name)
        self._ended = asyncio.get_running_loop().create_future()
        if self.module != "router":
            await asyncio.sleep(LOAD_S)
        if self.name in self._machine.broken:
            raise StartError(self.name, "its weights cannot be read")
        self._machine.num_started += 1
        self.at = f"{self.name}:{self._machine.num_started}"
        asyncio.get_running_loop().call_later(JOIN_S, self._join)
        metrics_at = f"{self.name}:{9000 + self._machine.num_started}" if self.config.metrics_port == 0 else ""
        return Addresses(self.at, metrics=metrics_at)

    def _join(self) -> None:
        if self.name not in self._machine.lost and not self._ended.done():
            self._machine.serving[self.at] = self
            self._machine.tell("serves", self.name)

    async def ending(self) -> str:
        cause: str = await asyncio.shield(self._ended)
        return cause

    def end(self, cause: str) -> None:
        self._machine.serving.pop(self.at, None)
        if not self._ended.done():
            self._ended.set_result(cause)

    async def leave(self) -> None:
        self.leaving = True
        self._machine.tell("leaves", self.name)
        self.end("")

    async def stop(self) -> None:
        self.leaving = True
        self.end("")

    def kill(self) -> None:
        self.end("killed")

    async def look(self) -> None:
        """Nobody tells it to switch but the supervisor."""

    async def set_encoders(self, addresses: tuple[str, ...]) -> None:
        self.config = self.config.model_copy(update={"encoders": addresses})
        self._machine.tell("encoders", " ".join(addresses))

    async def switch(self, role: str) -> None:
        if self.name in self._machine.broken:
            raise TandemError(f"{self.name}: its streams do not end")
        self.module = MODULES[role]


class Machine(SupervisorBackend):
    """What happens on it, in order; who is broken or not heard of is named."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.at_s: list[float] = []
        """Of each event."""
        self.serving: dict[str, Actor] = {}
        self.broken: set[str] = set()
        self.lost: set[str] = set()
        self.num_started = 0

    def role(self, *arguments: Any) -> Role:
        return Actor(self, *arguments)

    def several_hosts(self) -> bool:
        return False

    def here(self) -> Any:
        return "DEFAULT"

    async def workers_at(self, router: str, trust: TlsIdentity | None) -> set[str]:
        assert router.startswith("router")
        return {at for at, actor in self.serving.items() if actor.is_worker}

    def tell(self, what: str, name: str) -> None:
        self.events.append((what, name))
        self.at_s.append(asyncio.get_running_loop().time())

    def forget(self) -> None:
        self.events, self.at_s = [], []

    def starts_of(self, name: str) -> list[float]:
        return [at_s for at_s, event in zip(self.at_s, self.events, strict=True) if event == ("starts", name)]

    def named(self, name: str) -> Actor:
        (actor,) = (actor for actor in self.serving.values() if actor.name == name)
        return actor

    def workers(self) -> list[str]:
        return sorted(actor.name for actor in self.serving.values() if actor.is_worker)


class World:
    """A supervisor, and what is under it."""

    def __init__(self, topology: Topology, settings: RaySettings | None = None) -> None:
        self.machine, self._said = Machine(), io.StringIO()
        self.metrics_at: list[str] = []
        say = ProgressSteps(Console(file=self._said, width=200), "")
        self.supervisor = Supervisor(topology, settings or RaySettings(), say, autoscale=True, ground=self.machine)

    @property
    def said(self) -> str:
        return self._said.getvalue()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        await self.supervisor.start_media()
        await self.supervisor.start_routers()
        self.metrics_at = await self.supervisor.start_workers()
        await asyncio.sleep(2 * JOIN_S)
        reservations = asyncio.ensure_future(self.supervisor.keep())
        await asyncio.sleep(1)
        self.machine.forget()
        try:
            yield self
        finally:
            reservations.cancel()
            await asyncio.gather(reservations, return_exceptions=True)
            await self.supervisor.stop()


def of(prefill: int, decode: int, routers: int = 1) -> Topology:
    return plan_topology(prefill, decode, {"model": "m"}, {"model": "m"}, [0], routers)


async def test_where_metrics_are_is_said_of_each_worker_that_starts() -> None:
    async with World(plan_topology(1, 1, {"model": "m"}, {"model": "m", "metrics_port": 0}, [0], 1)).running() as world:
        assert world.metrics_at == [
            "http://decode-0:9002/metrics (decode-0)",
            "http://prefill-0:9003/metrics (prefill-0)",
        ]
        await world.supervisor.perform(Order(1, "scale", {"decode": 2}))
        world.machine.named("decode-0").end("its engine died")
        await asyncio.sleep(LOAD_S + 5)
    for said in ("http://decode-1:9004/metrics (decode-1)", "http://decode-0:9005/metrics (decode-0)"):
        assert f"metrics at {said}\n" in world.said


# ---------------------------------------------------------------------- room


class Nodes(WorkerGroup):
    """Room on a node that is lost after a while, and later on another one."""

    def __init__(self) -> None:
        super().__init__(RaySettings(), [])
        self.is_lost = self.is_there_another = False
        self.given_back: list[str] = []

    async def room(self, module: str, options: dict[str, Any]) -> dict[str, Any] | None:
        if await self.has_place(options):
            return options
        await asyncio.sleep(AT_ONCE_S)
        return {"scheduling_strategy": "another"} if self.is_there_another else None

    async def has_place(self, options: dict[str, Any]) -> bool:
        return options["scheduling_strategy"] == "another" or not self.is_lost

    def give_back(self, options: dict[str, Any]) -> None:
        self.given_back.append(options["scheduling_strategy"])


async def test_a_worker_whose_place_is_lost_while_it_starts_takes_another() -> None:
    world, nodes = World(of(1, 1)), Nodes()
    world.supervisor.group = nodes
    async with world.running():
        world.machine.named("decode-0").end("its node died")
        await asyncio.sleep(LOAD_S / 2)
        nodes.is_lost = True  # Ray says so later than the worker's own end
        await asyncio.sleep(LOAD_S)
        assert world.machine.workers() == ["prefill-0"]
        nodes.is_there_another = True
        await asyncio.sleep(LOAD_S + 10)
        assert world.machine.workers() == ["decode-0", "prefill-0"]
        assert nodes.given_back == ["SPREAD"]
    assert world.said.count("decode-0: waiting for room on the Ray cluster") == 1


async def test_a_worker_that_leaves_while_it_waits_gives_back_all_its_room() -> None:
    world, nodes = World(of(1, 2)), Nodes()
    world.supervisor.group = nodes
    async with world.running():
        nodes.is_lost = True
        world.machine.named("decode-1").end("its node died")
        await asyncio.sleep(LOAD_S)
        nodes.is_there_another = True
        await world.supervisor.perform(Order(1, "scale", {"decode": 1}))
        await asyncio.sleep(LOAD_S + 10)
        assert world.machine.workers() == ["decode-0", "prefill-0"]
        assert nodes.given_back == ["SPREAD", "another"]


# ---------------------------------------------------------------------- restarting


async def test_the_only_worker_of_a_role_leaves_when_another_one_has_joined() -> None:
    async with World(of(1, 1, routers=2)).running() as world:
        await world.supervisor.perform(RESTART)
        assert world.machine.events == [
            *(("starts", "decode-1"), ("serves", "decode-1"), ("leaves", "decode-0")),
            *(("starts", "prefill-1"), ("serves", "prefill-1"), ("leaves", "prefill-0")),
        ]
        await asyncio.sleep(1)
        assert world.machine.workers() == ["decode-1", "prefill-1"]
        await world.supervisor.perform(RESTART)
        assert world.machine.workers() == ["decode-0", "prefill-0"], "names that are free are taken again"
        world.machine.named("decode-0").end("its engine died")
        await asyncio.sleep(LOAD_S + 5)
        assert world.machine.workers() == ["decode-0", "prefill-0"], "whoever followed is kept"


async def test_the_only_one_is_that_of_its_model() -> None:
    models = [ClusterModel.parse({"path": path, "prefill": 0}) for path in ("a", "b")]
    async with World(plan_models(models, {}, {}, [0])).running() as world:
        await world.supervisor.perform(RESTART)
        assert [name for what, name in world.machine.events if what == "leaves"] == ["a-decode-0", "b-decode-0"]
        assert world.machine.workers() == ["a-decode-1", "b-decode-1"]


async def test_workers_of_which_there_are_several_leave_first_one_at_a_time() -> None:
    async with World(of(0, 2)).running() as world:
        await world.supervisor.perform(RESTART)
        assert world.machine.events == [
            *(("leaves", "decode-0"), ("starts", "decode-0"), ("serves", "decode-0")),
            *(("leaves", "decode-1"), ("starts", "decode-1"), ("serves", "decode-1")),
        ]


async def test_a_worker_whose_only_fellow_is_dead_is_the_only_one() -> None:
    async with World(of(0, 2)).running() as world:
        world.machine.broken = {"decode-1"}
        world.machine.named("decode-1").end("its engine died")
        restarting = asyncio.ensure_future(world.supervisor.perform(RESTART))
        await asyncio.sleep(LOAD_S + 2 * JOIN_S)
        assert ("leaves", "decode-0") in world.machine.events
        assert world.machine.events.index(("serves", "decode-2")) < world.machine.events.index(("leaves", "decode-0"))
        world.machine.broken = set()
        await restarting
        await asyncio.sleep(2 * LOAD_S)
        assert world.machine.workers() == ["decode-1", "decode-2"]


async def test_without_room_for_two_the_only_one_leaves_first_and_that_is_said() -> None:
    """A strict strategy places no worker beside those that it began with."""
    async with World(of(0, 1), RaySettings(strategy="STRICT_SPREAD")).running() as world:
        await world.supervisor.perform(RESTART)
        assert world.machine.events == [("leaves", "decode-0"), ("starts", "decode-0"), ("serves", "decode-0")]
        assert "decode-0: no room for a replacement beside it" in world.said


@pytest.mark.parametrize(("fault", "reason"), [("broken", "weights"), ("lost", "has not joined the router")])
async def test_if_nobody_can_follow_the_only_worker_it_goes_on(fault: str, reason: str) -> None:
    async with World(of(0, 1)).running() as world:
        setattr(world.machine, fault, {"decode-1"})
        with pytest.raises(TandemError, match=reason):
            await world.supervisor.perform(RESTART)
        await asyncio.sleep(JOIN_TIMEOUT_S)
        assert world.machine.events == [("starts", "decode-1")], "nobody left, and it is tried once"
        assert world.machine.workers() == ["decode-0"]
        assert await world.supervisor.sizes("") == {"prefill": 0, "decode": 1}
        setattr(world.machine, fault, set())
        await world.supervisor.perform(RESTART)
        assert world.machine.workers() == ["decode-1"]


async def test_a_worker_that_does_not_come_back_is_tried_again_and_the_others_stay() -> None:
    async with World(of(0, 2)).running() as world:
        world.machine.broken = {"decode-0"}
        with pytest.raises(TandemError, match="its weights cannot be read; its start is tried again"):
            await world.supervisor.perform(RESTART)
        await asyncio.sleep(2 * LOAD_S)
        assert len(world.machine.starts_of("decode-0")) == 3
        assert ("leaves", "decode-1") not in world.machine.events
        assert await world.supervisor.sizes("") == {"prefill": 0, "decode": 2}, "it is one of them"
        world.machine.broken = set()
        await asyncio.sleep(2 * LOAD_S)
        assert world.machine.workers() == ["decode-0", "decode-1"]
        assert "decode-0 runs again" in world.said


async def test_a_worker_that_was_told_to_stop_meanwhile_is_not_restarted() -> None:
    async with World(of(0, 3)).running() as world:
        restarting = asyncio.ensure_future(world.supervisor.perform(RESTART))
        await asyncio.sleep(1)
        world.machine.named("decode-1").end("")
        await restarting
        assert world.machine.workers() == ["decode-0", "decode-2"]


# ---------------------------------------------------------------------- starting again


async def test_waits_double_up_to_a_bound_and_begin_anew_after_a_long_life() -> None:
    world, back_s, loop = World(of(0, 2)), LONGEST_WAIT_S + LOAD_S + 2 * JOIN_S, asyncio.get_running_loop()

    def waits() -> list[float]:
        """Between a failure, `LOAD_S` after a start, and the next start."""
        starts = world.machine.starts_of("decode-0")
        return [round(after - before - LOAD_S, 6) for before, after in itertools.pairwise(starts)]

    def die() -> float:
        world.machine.named("decode-0").end("its engine died")
        return loop.time()

    async def wait_after(lived_s: float) -> float:
        """A life of so long, and up to `LONGEST_WAIT_S` more; and how long until it is started again. It serves again
        when this returns."""
        world.machine.forget()
        await asyncio.sleep(lived_s)
        died_at = die()
        await asyncio.sleep(back_s)
        (started_at,) = world.machine.starts_of("decode-0")
        return round(started_at - died_at, 6)

    async with world.running():
        world.machine.broken = {"decode-0"}
        died_at = die()
        await asyncio.sleep(9.9 * (LOAD_S + LONGEST_WAIT_S))
        assert world.machine.starts_of("decode-0")[0] - died_at == 0.5
        assert waits()[:8] == [1, 2, 4, 8, 16, 30, 30, 30]
        world.machine.broken = set()
        await asyncio.sleep(back_s)
        lives = [(1, 30), (LONG_ENOUGH_S, 0.5), (1, 1), (1, 2), (LONG_ENOUGH_S, 0.5)]
        assert [await wait_after(lived_s) for lived_s, _ in lives] == [wait_s for _, wait_s in lives]


# ---------------------------------------------------------------------- switching


def worker(name: str) -> pb.WorkerStatus:
    return pb.WorkerStatus(worker_id=name)


async def test_the_planner_switches_roles() -> None:
    async with World(of(2, 1)).running() as world:
        executor = RayExecutor(world.supervisor, "")
        assert await executor.sizes() == {"prefill": 2, "decode": 1}
        await executor.switch([worker("prefill-1"), worker("of-another-cluster")], "decode")
        assert await executor.sizes() == {"prefill": 1, "decode": 2}
        assert "prefill-1: decode workers now" in world.said

        world.machine.named("prefill-1").end("its engine died")
        await asyncio.sleep(LOAD_S + 5)
        assert world.machine.named("prefill-1").module == MODULES["decode"], "it begins again with the role it had last"

        world.machine.broken = {"prefill-1"}
        with pytest.raises(ExecutorFailed, match="prefill-1: its streams do not end"):
            await executor.switch([worker("prefill-1")], "prefill")
        assert await executor.sizes() == {"prefill": 1, "decode": 2}
        await executor.close()


async def test_the_last_decode_worker_is_not_to_be_ended() -> None:
    topology = of(1, 1)
    with pytest.raises(StartError) as caught:
        planner_config({"decode": {"min_workers": 0}}, topology.router)
    assert caught.value.field == "planner.decode.min_workers"
    assert "at least 1 on Ray: tandem up never ends the last decode worker" in caught.value.reason
    assert planner_config({"prefill": {"min_workers": 0}}, topology.router).prefill.min_workers == 0
    async with World(topology).running() as world:
        with pytest.raises(TandemError, match="decode=0: nothing would be served; tandem down ends the cluster"):
            await world.supervisor.perform(Order(1, "scale", {"decode": 0}))
        await world.supervisor.perform(Order(2, "scale", {"prefill": 0}))
        assert world.machine.workers() == ["decode-0"]


async def test_a_switch_waits_for_the_order_that_is_carried_out() -> None:
    async with World(of(1, 2)).running() as world:
        executor = RayExecutor(world.supervisor, "")
        await executor.scale("decode", 3)
        await asyncio.sleep(1)
        switching = asyncio.ensure_future(executor.switch([worker("decode-0")], "prefill"))
        await asyncio.sleep(LOAD_S / 2)
        assert await executor.sizes() == {"prefill": 1, "decode": 3}, "the one that starts is among them"
        assert not switching.done()
        await switching
        assert await executor.sizes() == {"prefill": 2, "decode": 2}
        await executor.close()


# ---------------------------------------------------------------------- preprocessor and encode workers


def with_media(replicas: int) -> World:
    worker = {"model": "m", "engine": "vllm"}
    return World(plan_media(plan_topology(1, 1, {"model": "m"}, worker, [0]), {}, {"replicas": replicas}))


async def test_routers_know_the_preprocessor_and_that_the_encode_workers() -> None:
    async with with_media(2).running() as world:
        roles = world.supervisor.roles
        assert list(roles) == ["encoder-0", "encoder-1", "preprocessor", "router", "decode-0", "prefill-0"]
        assert roles["preprocessor"].config.encoders == (roles["encoder-0"].at, roles["encoder-1"].at)
        assert [entry.preprocessor for entry in roles["router"].config.entries] == [roles["preprocessor"].at]
        await world.supervisor.perform(RESTART)
        assert {name for _, name in world.machine.events} == {"decode-0", "decode-1", "prefill-0", "prefill-1"}


async def test_encode_workers_and_the_preprocessor_start_again() -> None:
    """The preprocessor keeps its port, and learns where an encode worker is now."""
    async with with_media(1).running() as world:
        encoder, preprocessor = (world.supervisor.roles[name] for name in ("encoder-0", "preprocessor"))
        before = encoder.at, preprocessor.config.port
        world.machine.named("encoder-0").end("its node died")
        await asyncio.sleep(LOAD_S + 5)
        assert encoder.at != before[0]
        assert preprocessor.config.encoders == (encoder.at,)
        assert world.machine.events[-2:] == [("encoders", encoder.at), ("serves", "encoder-0")]
        world.machine.named("preprocessor").end("its actor died")
        await asyncio.sleep(LOAD_S + 5)
        assert world.machine.events[-3:] == [
            *(("starts", "preprocessor"), ("encoders", encoder.at), ("serves", "preprocessor"))
        ]
        assert preprocessor.config.port == before[1]


# ---------------------------------------------------------------------- groups and nodes


class Fixed(World):
    """A cluster whose workers are placed at once, and not by a planner."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(plan_topology(0, 1, {"model": "m"}, {"model": "m"}, [0]))
        say = ProgressSteps(Console(file=self._said, width=200), "")
        self.supervisor = Supervisor(topology, RaySettings(), say, ground=self.machine)
        self.supervisor.group = Nodes()


def grouped(decode: int, **worker: Any) -> Topology:
    return plan_topology(0, decode, {"model": "m"}, {"model": "m", "engine": "vllm"} | worker, [0])


async def test_a_group_knows_its_first_rank_and_restarts_at_once() -> None:
    async with Fixed(grouped(4, data_parallel=2)).running() as world:
        roles = {name: role for name, role in world.supervisor.roles.items() if name != "router"}
        firsts = {name: role.first.name if role.first else "" for name, role in roles.items()}
        assert firsts == {"decode-0": "", "decode-1": "decode-0", "decode-2": "", "decode-3": "decode-2"}
        await world.supervisor.perform(RESTART)
        leaving = [name for what, name in world.machine.events if what == "leaves"]
        assert [set(leaving[:2]), set(leaving[2:])] == [{"decode-0", "decode-1"}, {"decode-2", "decode-3"}]
        served = [name for what, name in world.machine.events if what == "serves"]
        assert world.machine.events.index(("leaves", leaving[2])) > world.machine.events.index(("serves", served[1]))
        again = world.supervisor.roles["decode-1"]
        assert again.first is world.supervisor.roles["decode-0"]
        assert again is not roles["decode-1"]


async def test_groups_and_workers_over_nodes_have_a_fixed_number() -> None:
    async with Fixed(grouped(2, data_parallel=2)).running() as world:
        with pytest.raises(TandemError, match="have a fixed number here"):
            await world.supervisor.perform(Order(1, "scale", {"decode": 4}))
    say = ProgressSteps(Console(file=io.StringIO()), "")
    for field, topology in (
        ("nodes", grouped(1, tensor_parallel=2, nodes=2)),
        ("data_parallel", grouped(2, data_parallel=2)),
    ):
        with pytest.raises(StartError, match="--autoscale starts workers one by one") as caught:
            Supervisor(topology, RaySettings(), say, autoscale=True, ground=Machine())
        assert caught.value.field == field


async def test_a_worker_over_nodes_has_a_place_on_each() -> None:
    async with Fixed(grouped(2, tensor_parallel=4, nodes=2)).running() as world:
        roles = [role for role in world.supervisor.roles.values() if role.is_worker]
        assert [len(role.further_nodes) for role in roles] == [1, 1]
