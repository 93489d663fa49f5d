"""One role as a Ray actor: the actor, and the driver's handle of it."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from cluster import roles
from cluster.config import Config
from cluster.errors import StartError, TandemError
from cluster.process import Addresses
from tandem.topology import MODULES

STOP_TIMEOUT_S = 10.0
LOOK_S = 5.0
ATTEMPTS, BETWEEN_ATTEMPTS_S = 4, 2.0
"""Attempts to start an actor, and the seconds between them."""


class RoleActor:
    """Actor that runs one role."""

    def __init__(self) -> None:
        self._role: Any = None

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

    async def ended(self) -> str:
        """Wait for the end; return its cause, or empty after a requested stop."""
        failing, stopping = (
            asyncio.ensure_future(self._role.failed()),
            asyncio.ensure_future(self._role.stop_requested()),
        )
        await asyncio.wait([failing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            stopping.cancel()
            return str(failing.result())
        failing.cancel()
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
    from decode_worker.program import add_services
    from engine.worker.runtime import start_worker

    role: roles.Role = "prefill" if module == "prefill_worker" else "decode"
    set_up(role, config.id_for(role), config)
    return await start_worker(config, role, add_services)


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
    leaving: bool = False
    """Whether its end is wanted."""

    async def start(self) -> Addresses:
        """Start the actor; return its addresses.

        Raises StartError with the cause.

        An actor that dies silently was placed on a node that had just gone; it is started elsewhere.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._start()
            except ray.exceptions.RayActorError as error:
                if attempt == ATTEMPTS:
                    raise StartError(self.name, f"its actor died: {_first_line(error)}") from None
                await asyncio.sleep(BETWEEN_ATTEMPTS_S)
            except ray.exceptions.RayError as error:
                raise StartError(self.name, _first_line(error)) from None
        raise AssertionError("the last attempt raises")

    async def _start(self) -> Addresses:
        self.handle = ray.remote(RoleActor).options(max_concurrency=8, **self.options).remote()
        try:
            where: Addresses = await self.handle.start.remote(self.module, self.config, self.of_node)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            at, reason = (cause.field, cause.reason) if isinstance(cause, StartError) else ("start", str(cause))
            raise StartError(f"{self.name}: {at}", reason) from None
        self.at, self.account = where.grpc, where.start
        return where

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
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.handle)


def _first_line(error: Exception) -> str:
    """Return the first line of an error; Ray's are pages long."""
    return str(error).partition("\n")[0]
