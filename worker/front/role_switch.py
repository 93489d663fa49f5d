"""Role switch of a worker, with weights and cache in place.

Both kinds of worker run both services, and an engine can compute either's work. A role is how routers see the worker,
and how many prompt tokens a step may have. So a switch is a drain (`runtime.py`), and a membership that ends and begins
again. Process, pool, cache and incarnation stay the same: block keys stay valid, and a loan placed before the switch
works after it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cluster.config import ON_WIRE, Role
from cluster.errors import Draining, Unavailable
from engine.config import WorkerConfig
from engine.core_types import GpuDevice
from engine.messages.to_engine import SetBudget
from engine.process.front.engine_client import EngineClient
from engine.settings import step_budget
from worker.front.membership import Memberships

log = logging.getLogger(__name__)

JOIN_S = 5.0
"""Seconds for routers to accept the worker again."""


class RoleSwitch:
    """Role and role switch of one worker."""

    def __init__(
        self,
        role: Role,
        config: WorkerConfig,
        engine: EngineClient,
        gpu: GpuDevice | None,
        on_role: Callable[[Role], object],
    ) -> None:
        """Create it; `gpu` is the engine's, and `on_role` is called with each new role."""
        self.role: Role = role
        self._config = config
        self._engine = engine
        self._gpu = gpu
        self._on_role = on_role
        self._lock = asyncio.Lock()
        self._memberships: Memberships | None = None
        self._empty: Callable[[], Awaitable[int]]
        self._resume: Callable[[], bool]
        self.before_decode: list[Callable[[], object]] = []
        """Things to load before a worker first decodes; called on a thread."""

    def joined(self, memberships: Memberships, empty: Callable[[], Awaitable[int]], resume: Callable[[], bool]) -> None:
        """Enable switching.

        `empty` finishes or hands over work in flight and returns the number of requests handed over.

        `resume` accepts work again; it returns False when a stop was requested meanwhile.
        """
        self._memberships, self._empty, self._resume = memberships, empty, resume

    async def to(self, role: Role) -> int:
        """Switch to `role`; return the number of requests that were handed over.

        One switch at a time.

        Raises Draining when a stop was requested, and Unavailable before the worker has joined.
        """
        async with self._lock:
            if role == self.role:
                return 0
            if (memberships := self._memberships) is None:
                raise Unavailable("this worker has not joined a router yet")
            if role == "decode":
                for load in self.before_decode:
                    await asyncio.to_thread(load)
            handed_over = await self._empty()
            self._engine.send(SetBudget(step_budget(self._config, role, self._gpu)))
            if not self._resume():
                raise Draining("this worker was told to stop")
            log.info("this worker is a %s worker from now on; %d requests handed over", role, handed_over)
            self.role = role
            self._on_role(role)
            await memberships.rejoin(ON_WIRE[role], JOIN_S)
            return handed_over
