"""The roles as Ray actors: `tandem up`, and the same submitted as a Ray job.

Ray places the actors; this driver waits for any of them to fail. Stopping goes from the roles to Ray: each role
closes its server and its engine process, then its actor goes, then a Ray cluster that was started here.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import ray.exceptions

from cluster.config import Config
from cluster.errors import StartError, TandemError
from cluster.process import Addresses
from cluster.tls import member_of
from tandem.members import await_members
from tandem.steps import Steps
from tandem.topology import Topology

STOP_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 60.0
OBJECT_STORE_BYTES = 100 << 20
"""Tandem keeps nothing in Ray's object store; this is near its least size."""


class RoleActor:
    """Runs one role inside an actor's process. Made remote by `serve`."""

    def __init__(self) -> None:
        self._role: Any = None

    async def start(self, module: str, config: Config) -> Addresses:
        """Where it serves. A failure travels to the driver as its text."""
        from cluster.logs import set_up

        set_up(module)
        self._role = await _start_role(module, config)
        where: Addresses = self._role.addresses
        return where

    async def ended(self) -> str:
        """The cause when the role cannot go on; empty once it was told to stop by a call, and has left."""
        failing, told = asyncio.ensure_future(self._role.failed()), asyncio.ensure_future(self._role.told_to_stop())
        await asyncio.wait([failing, told], return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            told.cancel()
            return str(failing.result())
        failing.cancel()
        await self._role.drain()
        await self.stop()
        return ""

    async def stop(self) -> None:
        role, self._role = self._role, None
        if role is not None:
            await role.stop()


async def _start_role(module: str, config: Any) -> Any:
    if module == "router":
        from router.runtime import start_router

        return await start_router(config)
    from engine.worker.runtime import start_worker

    if module == "prefill_worker":
        from prefill_worker.service import add_lend_service

        return await start_worker(config, "prefill", add_lend_service)
    from decode_worker.__main__ import add_services

    return await start_worker(config, "decode", add_services)


@dataclass(slots=True)
class _Actor:
    name: str
    handle: Any


async def serve(topology: Topology, say: Steps) -> None:
    """Start everything, say where it serves, and return after SIGINT or SIGTERM. Raises TandemError with the cause
    of whatever failed."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with _ray(say):
        # Ray installs handlers of its own when it starts; these must come after.
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop.set)
        actors: list[_Actor] = []
        stopping = asyncio.ensure_future(stop.wait())
        serving = asyncio.ensure_future(_serve(topology, say, actors))
        try:
            await asyncio.wait([stopping, serving], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            say("stopping")
            for task in (stopping, serving):
                task.cancel()
            await asyncio.gather(stopping, serving, return_exceptions=True)
            await asyncio.gather(*(_stop(actor) for actor in actors))
    say("stopped")


async def _serve(topology: Topology, say: Steps, actors: list[_Actor]) -> None:
    """Returns when every role was told to stop by itself; raises when one fails."""
    say("starting the router")
    started = [await _start(actors, config.router_id or "router", "router", config) for config in topology.routers]
    addresses = [where.grpc for where in started]
    joined_at = tuple(where.internal or where.grpc for where in started)
    say(f"loading the model into {topology.num_workers} workers")
    await asyncio.gather(
        *(
            _start(actors, config.worker_id, module, config.model_copy(update={"routers": joined_at}))
            for module, config in topology.workers()
        )
    )
    for address, config in zip(joined_at, topology.routers, strict=True):
        await await_members(address, member_of(config), len(topology.prefill), len(topology.decode), JOIN_TIMEOUT_S)
    say(f"serving at {', '.join(addresses)}; Ctrl-C stops")
    config = topology.router
    scheme = "https" if config.tls_cert or config.tls_public_cert else "http"
    if http := [f"{scheme}://{where.http}/v1" for where in started if where.http]:
        say(f"OpenAI-compatible API at {', '.join(http)}")
    if metrics := [
        f"{'https' if config.tls_cert else 'http'}://{where.metrics}/metrics" for where in started if where.metrics
    ]:
        say(f"metrics at {', '.join(metrics)}")
    say(f"try: tandem generate --address {','.join(addresses)} 'Once upon a time'")
    say.done()
    endings = {asyncio.ensure_future(_ending(actor)) for actor in actors}
    while endings:
        done, endings = await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        for failure in filter(None, [ending.result() for ending in done]):
            raise failure


async def _start(actors: list[_Actor], name: str, module: str, config: Config) -> Addresses:
    """Where it serves. Placement is Ray's; cores are pinned by the role itself, so actors ask Ray for none."""
    actor = _Actor(name, ray.remote(RoleActor).options(num_cpus=0, max_concurrency=8).remote())
    actors.append(actor)
    try:
        addresses: Addresses = await actor.handle.start.remote(module, config)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        field, reason = (cause.field, cause.reason) if isinstance(cause, StartError) else ("start", str(cause))
        raise StartError(f"{name}: {field}", reason) from None
    except ray.exceptions.RayActorError as error:
        raise StartError(name, f"its actor died: {error}") from None
    return addresses


async def _ending(actor: _Actor) -> TandemError | None:
    """None of one that was told to stop and did."""
    try:
        cause: str = await actor.handle.ended.remote()
    except ray.exceptions.RayError as error:
        cause = f"its actor died: {str(error).splitlines()[0]}"
    return TandemError(f"{actor.name}: {cause}") if cause else None


async def _stop(actor: _Actor) -> None:
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await actor.handle.stop.remote()
    ray.kill(actor.handle)


@contextlib.asynccontextmanager
async def _ray(say: Steps) -> AsyncIterator[None]:
    """Join the running Ray cluster, or start one for as long as this lasts."""
    quiet = {"log_to_driver": True, "logging_level": "error", "configure_logging": True}
    try:
        ray.init(address="auto", **quiet)
        say("joined the Ray cluster that was running")
    except ConnectionError:
        say("no Ray cluster is running: starting one on this machine")
        ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
    try:
        yield
    finally:
        ray.shutdown()
