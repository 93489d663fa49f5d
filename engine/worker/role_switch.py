"""A worker that turns from one role into the other, with its weights in place and its cache as it is.

Either kind of worker has both services, and its engine can compute either's work: a role is how routers know it, and
how many prompt tokens a step may have. So a switch is what draining is (`runtime.py`), and a membership that ends and
begins again. The incarnation stays the same: process, pool and cache are, so what names its blocks still means them,
and a loan from it that was placed before is as good as one placed after.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cluster.errors import Draining, Unavailable
from cluster.roles import ON_WIRE, Role
from engine.config import WorkerConfig
from engine.core.scheduler import StepBudget
from engine.messages import SetBudget
from engine.process.engine_client import EngineClient
from engine.worker.membership import Memberships

log = logging.getLogger(__name__)

JOIN_S = 5.0
"""For routers to take it back."""


class RoleSwitch:
    """Of one worker."""

    def __init__(
        self, role: Role, config: WorkerConfig, engine: EngineClient, on_role: Callable[[Role], object]
    ) -> None:
        """`on_role` hears of each change."""
        self.role: Role = role
        self._config = config
        self._engine = engine
        self._on_role = on_role
        self._turn = asyncio.Lock()
        self._memberships: Memberships | None = None
        self._empty: Callable[[], Awaitable[int]]
        self._resume: Callable[[], bool]
        self.before_decode: list[Callable[[], object]] = []
        """What is to be loaded before the first request of a worker that did not decode; called on a thread."""

    def joined(self, memberships: Memberships, empty: Callable[[], Awaitable[int]], resume: Callable[[], bool]) -> None:
        """From now on it can switch. `empty` finishes or hands over everything under way, and says how many requests
        went elsewhere; `resume` takes work again, or is False of a worker that was told to stop meanwhile."""
        self._memberships, self._empty, self._resume = memberships, empty, resume

    async def to(self, role: Role) -> int:
        """It has that role when this returns; the requests that were handed over. One switch at a time. Raises Draining
        for a worker that was told to stop, and Unavailable for one that has not joined yet."""
        async with self._turn:
            if role == self.role:
                return 0
            if (memberships := self._memberships) is None:
                raise Unavailable("this worker has not joined anybody yet")
            if role == "decode":
                for load in self.before_decode:
                    await asyncio.to_thread(load)
            handed_over = await self._empty()
            config = self._config
            self._engine.send(SetBudget(StepBudget(config.max_batch_tokens, config.prefill_chunk(role))))
            if not self._resume():
                raise Draining("this worker was told to stop")
            log.info("a %s worker from now on; %d requests handed over", role, handed_over)
            self.role = role
            self._on_role(role)
            await memberships.rejoin(ON_WIRE[role], JOIN_S)
            return handed_over
