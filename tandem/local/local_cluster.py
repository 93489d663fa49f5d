"""The roles as plain processes of this machine, for `tandem demo`, tests and benchmarks."""

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from cluster.config import Config, secrets_of, to_overrides
from cluster.errors import StartError
from cluster.network.tls import member_of
from cluster.process.tasks import Tasks, all_of, each_of
from encode_worker.config import EncoderConfig
from engine.config import WorkerConfig
from preprocessor.config import PreprocessorConfig
from router.config import RouterConfig
from tandem.cluster_file import PREPROCESSOR, encoder_name, with_preprocessor
from tandem.members import await_members
from tandem.topology import Topology

# Roles are started by fork and exec, and need none of gRPC's handlers of forks: a start was lost beside them, as
# docs/log.md says.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

Say = Callable[[str], None]
START_TIMEOUT_S = 300.0
LAST_LINES = 20


@dataclass(slots=True)
class RoleProcess:
    """A started `python -m ROLE`."""

    name: str
    process: asyncio.subprocess.Process
    address: str
    http_address: str = ""
    """HTTP address of a router that serves HTTP."""
    metrics_address: str = ""
    internal_address: str = ""
    """Address of a router for workers, when it is a separate one."""

    @property
    def joined_at(self) -> str:
        """Address of a router at which workers join."""
        return self.internal_address or self.address

    @property
    def pid(self) -> int:
        return self.process.pid


async def start_role(
    module: str, name: str, config: Config, entered: Callable[[list[str]], list[str]] = list
) -> RoleProcess:
    """Start a role and wait until it serves; `entered` turns its command into the one that is run.

    Raises StartError with the process's reason.
    """
    process = await asyncio.create_subprocess_exec(
        *entered([sys.executable, "-m", module, *to_overrides(config)]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the launcher, which stops its roles in order
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(secrets_of(config).encode())
    process.stdin.close()
    last_lines: deque[str] = deque(maxlen=LAST_LINES)
    relay = _RELAYS.spawn(_relay(process, name, last_lines))
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await process.stdout.readline()
    except TimeoutError:
        await stop_process(process)
        raise StartError(name, f"was not ready within {START_TIMEOUT_S:g} s") from None
    except asyncio.CancelledError:
        await stop_process(process)
        raise
    if not line:
        await relay
        await process.wait()
        cause = last_lines[-1] if last_lines else f"ended with code {process.returncode}"
        field, _, reason = cause.removeprefix("error: ").partition(": ")
        raise StartError(f"{name}: {field}", reason)
    ready = json.loads(line)
    return RoleProcess(name, process, ready["address"], ready["http"], ready["metrics"], ready["internal"])


_RELAYS = Tasks("the log of a process is shown no more")
"""Relays of logs, each of which ends with its process."""


async def _relay(process: asyncio.subprocess.Process, name: str, last_lines: deque[str]) -> None:
    """Forward the role's log under its name."""
    assert process.stderr is not None
    async for raw in process.stderr:
        line = raw.decode(errors="replace").rstrip()
        last_lines.append(line)
        if not line.startswith("error: "):
            print(f"[{name}] {line}", file=sys.stderr)


async def stop_process(process: asyncio.subprocess.Process, grace_s: float = 30.0) -> None:
    """Send SIGTERM, and SIGKILL after `grace_s`."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


class LocalCluster:
    """Routers, workers and what makes pictures ready; an async context manager that leaves no process behind."""

    def __init__(self, topology: Topology, say: Say = lambda _: None) -> None:
        self.topology = topology
        """Settings of all roles; `replace_roles` changes them."""
        self._say = say
        self.routers: list[RoleProcess] = []
        self.prefill: list[RoleProcess] = []
        self.decode: list[RoleProcess] = []
        self.encoders: list[RoleProcess] = []
        self.preprocessor: RoleProcess | None = None

    @property
    def router(self) -> RoleProcess:
        """The first router."""
        return self.routers[0]

    @router.setter
    def router(self, started_again: RoleProcess) -> None:
        self.routers[0] = started_again

    @property
    def address(self) -> str:
        """Address of the first router."""
        return self.router.address

    @property
    def addresses(self) -> list[str]:
        """Addresses of all routers."""
        return [router.address for router in self.routers]

    def replace_roles(self, **roles: Any) -> None:
        """Set fields of the topology, of roles that are not started yet."""
        self.topology = replace(self.topology, **roles)

    @property
    def workers(self) -> Sequence[RoleProcess]:
        return [*self.prefill, *self.decode]

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def add_worker(self, module: str, config: WorkerConfig) -> RoleProcess:
        """Start one more worker, and let it join; with Redis it finds the routers itself."""
        joined = (
            config
            if config.redis_url
            else config.model_copy(update={"routers": tuple(router.joined_at for router in self.routers)})
        )
        worker = await start_role(module, config.worker_id, _stops_at_once(joined))
        (self.decode if module == "decode_worker" else self.prefill).append(worker)
        return worker

    async def add_router(self, config: RouterConfig) -> RoleProcess:
        """Start one more router.

        Only workers that find it in Redis join it.
        """
        name = config.router_id or (f"router-{len(self.routers)}" if self.routers else "router")
        router = await start_role("router", name, _stops_at_once(config))
        self.routers.append(router)
        return router

    async def stop(self) -> None:
        media = [] if self.preprocessor is None else [self.preprocessor]
        roles = [*self.workers, *self.routers, *media, *self.encoders]
        await each_of(stop_process(role.process) for role in roles)

    async def _start(self) -> None:
        routers = self.topology.routers
        if (preprocessor := self.topology.preprocessor) is not None:
            routers = with_preprocessor(routers, await self._start_media(preprocessor))
        self._say("starting the router")
        for config in routers:
            await self.add_router(config)
        self._say(f"router at {', '.join(self.addresses)}; loading the model into {self.topology.num_workers} workers")
        await all_of(self.add_worker(module, worker) for module, worker in self.topology.workers())
        self._say("waiting until every worker has joined the router")
        for router, config in zip(self.routers, self.topology.routers, strict=True):
            await await_members(
                router.joined_at, member_of(config), len(self.prefill), len(self.decode), START_TIMEOUT_S
            )

    async def _start_media(self, config: PreprocessorConfig) -> str:
        """Start encode workers, then the preprocessor that names them; return its address."""
        if self.topology.encoders:
            self._say(f"loading the model's encoder into {len(self.topology.encoders)} encode workers")
            await all_of(self._add_encoder(encoder_name(n), each) for n, each in enumerate(self.topology.encoders))
            config = config.model_copy(update={"encoders": tuple(encoder.address for encoder in self.encoders)})
        self._say("starting the preprocessor")
        self.preprocessor = await start_role("preprocessor", PREPROCESSOR, _stops_at_once(config))
        return self.preprocessor.address

    async def _add_encoder(self, name: str, config: EncoderConfig) -> None:
        self.encoders.append(await start_role("encode_worker", name, _stops_at_once(config)))


Settings = TypeVar("Settings", RouterConfig, WorkerConfig, PreprocessorConfig, EncoderConfig)


def _stops_at_once(config: Settings) -> Settings:
    """Set the drain time to 0 unless it is set: all processes of such a cluster stop together."""
    return config if "drain_s" in config.model_fields_set else config.model_copy(update={"drain_s": 0.0})
