"""One role as a Ray actor: the actor, and the driver's handle of it.

A worker over several nodes is an actor on each. Ranks of a data-parallel group find the first one by its node's
address, which is known once its actor is placed.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from cluster.config import Config
from cluster.errors import StartError, TandemError
from cluster.process.life import Addresses
from cluster.process.tasks import Tasks, first_of
from cluster.roles import Role as WorkerRole
from tandem.topology import MODULES

STOP_TIMEOUT_S = 10.0
LOOK_S = 5.0
OF_RAY = (":job_id:", ":actor_name:")
"""Beginnings of Ray's own lines in a log."""
LAST_LINES = 20
"""Number of a log's last lines that are shown where a role does not start."""
ATTEMPTS, BETWEEN_ATTEMPTS_S = 4, 2.0
"""Attempts to start an actor, and the seconds between them."""


class RoleActor:
    """Actor that runs one role.

    All that it and its child processes print is in one log file of Ray.
    """

    def __init__(self) -> None:
        self._role: Any = None
        os.dup2(2, 1)  # vLLM logs to standard output

    def log(self) -> str:
        """Return the path of its log, on its node."""
        return os.readlink("/proc/self/fd/2")

    def last_lines(self) -> list[str]:
        return last_lines(self.log())

    async def start(self, module: str, config: Config, of_node: dict[str, str]) -> Addresses:
        """Start the role; return its addresses.

        A failure reaches the driver as its text.

        `of_node`: settings that should hold this node's address.
        """
        if of_node:
            config = config.model_copy(update=dict.fromkeys(of_node, ray.util.get_node_ip_address()))
        self._role = await _start_role(module, config)
        where: Addresses = self._role.addresses
        return where

    def node_ip(self) -> str:
        """Return the address of this actor's node."""
        return str(ray.util.get_node_ip_address())

    async def ended(self) -> str:
        """Wait for the end; return its cause, or empty after a requested stop."""
        failure = await first_of(self._role.failed(), self._role.stop_requested())
        if failure is not None:
            return str(failure)
        await self.leave()
        return ""

    async def role(self) -> str:
        """Return the present role of a worker: prefill or decode."""
        return "" if self._role is None else str(self._role.role)

    async def switch(self, role: str) -> None:
        """Switch a worker's role.

        A failure reaches the driver as its text.
        """
        await self._role.switch(role)

    async def set_encoders(self, addresses: tuple[str, ...]) -> None:
        """Name other encode workers to a preprocessor; one that has not started gets them with its settings."""
        if self._role is not None:
            self._role.set_encoders(addresses)

    async def leave(self) -> None:
        """Stop with a drain: work in flight is finished or handed over."""
        if self._role is not None:
            await self._role.drain()
            await self.stop()

    async def stop(self) -> None:
        role, self._role = self._role, None
        if role is not None:
            await role.stop()


async def _start_role(module: str, config: Any) -> Any:
    from cluster.logs import set_up

    if module == "router":
        from router.runtime import start_router

        set_up("router", config.id(), config)
        return await start_router(config)
    if module == "preprocessor":
        from preprocessor.runtime import start_preprocessor

        set_up("preprocessor", config.id(), config)
        return await start_preprocessor(config)
    if module == "encode_worker":
        from encode_worker.program import start_encode_worker

        set_up("encoder", config.id(), config)
        return await start_encode_worker(config)
    from worker.requests.service import serve_requests
    from worker.runtime import start_worker

    role: WorkerRole = "prefill" if module == "prefill_worker" else "decode"
    set_up(role, config.id_for(role), config)
    if config.node_rank:
        from worker.headless import start_headless

        return await start_headless(config, role)
    return await start_worker(config, role, serve_requests)


@dataclass(slots=True, eq=False)
class Role:
    """A role that should run."""

    name: str
    module: str
    config: Any
    options: dict[str, Any]
    of_node: dict[str, str] = field(default_factory=dict)
    handle: Any = None
    at: str = ""
    """gRPC address since the last start."""
    account: str = ""
    """Account of a worker's last start."""
    note: Callable[[str], object] = lambda _: None
    """Function that shows a line about its start."""
    log: str = ""
    """Log of its last start, on its actor's node."""
    leaving: bool = False
    """Whether its end is wanted."""
    further_nodes: list[dict[str, Any]] = field(default_factory=list)
    """Options of the actors on a worker's further nodes."""
    first: "Role | None" = None
    """First rank of its data-parallel group; None for the first itself, and for workers of their own."""
    _nodes: list[Any] = field(default_factory=list)
    """Handles of the actors on further nodes."""
    _placed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once there is a handle."""

    @property
    def is_worker(self) -> bool:
        """Whether it is a prefill or decode worker."""
        return self.module in MODULES.values()

    async def start(self) -> Addresses:
        """Start the actor; return its addresses.

        Raises StartError with the cause.

        An actor that dies silently was placed on a node that had just gone; it is started elsewhere.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._start()
            except ray.exceptions.RayActorError as error:
                self._show(self.name, last_lines(self.log))
                if attempt == ATTEMPTS:
                    raise StartError(self.name, f"its actor died: {_first_line(error)}") from None
                await asyncio.sleep(BETWEEN_ATTEMPTS_S)
            except ray.exceptions.RayError as error:
                raise StartError(self.name, _first_line(error)) from None
        raise AssertionError("the last attempt raises")

    async def _start(self) -> Addresses:
        self.handle = _actor(self.options)
        self._placed.set()
        try:
            where = await self._start_all()
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            at, reason = (cause.field, cause.reason) if isinstance(cause, StartError) else ("start", str(cause))
            raise StartError(f"{self.name}: {at}", reason) from None
        self.at, self.account = where.grpc, where.start
        return where

    async def _start_all(self) -> Addresses:
        """Start the worker, and its program on each further node; return the worker's addresses."""
        config = self.config
        if self.first is not None:
            config = config.model_copy(update={"data_parallel_address": await self.first.node_ip()})
        if self.further_nodes:
            config = config.model_copy(update={"master_addr": await self.node_ip()})
        self._nodes = [_actor(options) for options in self.further_nodes]
        async with Tasks() as tasks:
            of_nodes = [
                tasks.spawn(self._begin(handle, config.model_copy(update={"node_rank": number}), {}))
                for number, handle in enumerate(self._nodes, start=1)
            ]
            starting = tasks.spawn(self._begin(self.handle, config, self.of_node))
            while not starting.done():  # it waits for each node, so one that does not start must end the wait
                await asyncio.wait([starting, *of_nodes], return_when=asyncio.FIRST_COMPLETED)
                for each in (task for task in list(of_nodes) if task.done()):
                    of_nodes.remove(each)
                    each.result()
            return starting.result()

    async def _begin(self, handle: Any, config: Any, of_node: dict[str, str]) -> Addresses:
        """Start the program of an actor; show where its log is, and the end of it where it does not start."""
        node = getattr(config, "node_rank", 0)
        name, log = f"{self.name} on node {node}" if node else self.name, await handle.log.remote()
        if not node:
            self.log = log
        self.note(f"{name} starts; its log: {log}")
        try:
            where: Addresses = await handle.start.remote(self.module, config, of_node)
        except ray.exceptions.RayTaskError:
            self._show(name, await handle.last_lines.remote())
            raise
        self.note(f"{name} is ready" + (f", started in {where.start}" if where.start else ""))
        return where

    def _show(self, name: str, lines: list[str]) -> None:
        for line in lines:
            self.note(f"[{name}] {line}")

    async def node_ip(self) -> str:
        """Return the address of its actor's node, once it is placed."""
        await self._placed.wait()
        address: str = await self.handle.node_ip.remote()
        return address

    async def ending(self) -> str:
        """Wait for the end; return its cause, empty after a requested stop."""
        try:
            cause: str = await self.handle.ended.remote()
        except ray.exceptions.RayError as error:
            cause = f"its actor died: {_first_line(error)}"
        return cause

    async def look(self) -> None:
        """Update the present role, which any client may have switched.

        Without an answer the old role stays.
        """
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(LOOK_S):
                self.module = MODULES.get(await self.handle.role.remote(), self.module)

    async def switch(self, role: str) -> None:
        """Switch the role.

        Raises TandemError.
        """
        try:
            await self.handle.switch.remote(role)
        except ray.exceptions.RayError as error:
            raise TandemError(f"{self.name}: {_first_line(error)}") from None
        self.module = MODULES[role]

    async def set_encoders(self, addresses: tuple[str, ...]) -> None:
        """Name encode workers to a preprocessor, now and for its next starts; one that ends gets them then."""
        self.config = self.config.model_copy(update={"encoders": addresses})
        with contextlib.suppress(ray.exceptions.RayError):
            await self.handle.set_encoders.remote(addresses)

    async def leave(self) -> None:
        """Drain and stop."""
        self.leaving = True
        with contextlib.suppress(ray.exceptions.RayError):
            await self.handle.leave.remote()
        self.kill()

    async def stop(self) -> None:
        """Stop at once, or nearly."""
        self.leaving = True
        if self.handle is None:
            return
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.handle.stop.remote()
        self.kill()

    def kill(self) -> None:
        self._placed.clear()
        nodes, self._nodes = self._nodes, []
        for handle in (self.handle, *nodes):
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(handle)


def _actor(options: dict[str, Any]) -> Any:
    return ray.remote(RoleActor).options(max_concurrency=8, **options).remote()


def last_lines(log: str) -> list[str]:
    """Return the last lines of a log; none where it is another node's."""
    if not log or not Path(log).exists():
        return []
    with open(log, errors="replace") as file:
        return [line.rstrip() for line in deque(file, LAST_LINES) if not line.startswith(OF_RAY)]


def _first_line(error: Exception) -> str:
    """Return the first line of an error; Ray's are pages long."""
    return str(error).partition("\n")[0]
