"""Where requests wait: in order of priority and arrival, until some pair can start them."""

import asyncio
import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.errors import Overloaded
from engine.keys import BlockKey
from router.demand import Demand
from router.fleet import Fleet, Placed
from router.placement import Decision


@dataclass(slots=True, eq=False)
class _Waiting:
    order: tuple[int, int]
    """(-priority, arrival)."""
    demand: Demand
    keys: Sequence[BlockKey]
    placed: "asyncio.Future[tuple[Placed, Decision]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Dispatcher:
    """Late binding: a request gets its pair at the moment it can start. The first in line keeps its turn."""

    def __init__(self, fleet: Fleet, max_queued: int) -> None:
        self._fleet = fleet
        self._max_queued = max_queued
        self._waiting: list[_Waiting] = []
        self._arrivals = itertools.count()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def place(self, demand: Demand, keys: Sequence[BlockKey], priority: int) -> tuple[Placed, Decision]:
        """Wait for a pair; the caller must tell the fleet when the placement ended. Raises Overloaded."""
        if len(self._waiting) >= self._max_queued:
            raise Overloaded(f"{len(self._waiting)} requests wait already")
        waiting = _Waiting((-priority, next(self._arrivals)), demand, keys)
        bisect.insort(self._waiting, waiting, key=lambda other: other.order)
        self.kick()
        try:
            return await asyncio.shield(waiting.placed)
        except asyncio.CancelledError:
            self._withdraw(waiting)
            raise

    def kick(self) -> None:
        """Something changed: start whoever can start, in order."""
        while self._waiting:
            head = self._waiting[0]
            decision = self._fleet.decide(head.demand, head.keys)
            if decision is None:
                return
            self._waiting.pop(0)
            head.placed.set_result((self._fleet.placed(decision, head.demand, head.keys), decision))

    def _withdraw(self, waiting: _Waiting) -> None:
        """Its client is gone; if it was placed in this very moment, take that back."""
        if waiting.placed.done():
            self._fleet.ended(waiting.placed.result()[0])
        else:
            self._waiting.remove(waiting)
        self.kick()
