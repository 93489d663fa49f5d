"""Control of a running cluster: a named actor by which `tandem scale`, `restart` and `down` reach its driver.

The driver takes orders from it one at a time, and answers each. The actor ends with the driver.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import ray.exceptions

from cluster.errors import StartError, TandemError

NAMESPACE = "tandem"


@dataclass(frozen=True, slots=True)
class Order:
    """Order for the driver."""

    number: int
    what: str
    """Kind: scale, restart or down."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Desired number of workers by role."""
    model: str = ""
    """Model, when there are several."""


class ControlActor:
    """Actor, made remote by the driver."""

    def __init__(self) -> None:
        self._orders: asyncio.Queue[Order] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[tuple[str, list[str]]]] = {}
        self._count = 0

    async def order(self, what: str, counts: dict[str, int], model: str) -> tuple[str, list[str]]:
        """Send an order; return why it was not done, or empty, and what is told of it."""
        self._count += 1
        number = self._count
        answer: asyncio.Future[tuple[str, list[str]]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._orders.put_nowait(Order(number, what, counts, model))
        try:
            return await answer
        finally:
            del self._answers[number]

    async def next(self) -> Order:
        """Return the next order, for the driver."""
        return await self._orders.get()

    def answer(self, number: int, refused: str, lines: list[str]) -> None:
        """Answer an order, for the driver."""
        if (waiting := self._answers.get(number)) is not None and not waiting.done():
            waiting.set_result((refused, lines))


def name_of(cluster_name: str) -> str:
    return f"tandem-control-{cluster_name}"


def order(cluster_name: str, what: str, counts: dict[str, int], model: str = "") -> list[str]:
    """Send an order from another process; return what is told of it, line by line.

    Raises StartError where no such cluster runs, and TandemError where the order was not done.
    """
    try:
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    except ConnectionError:
        raise StartError("ray", "no Ray cluster is running here") from None
    try:
        control: Any = ray.get_actor(name_of(cluster_name))
        refused, lines = ray.get(control.order.remote(what, counts, model))
    except ValueError:
        raise StartError("name", f"no cluster named {cluster_name!r} runs on this Ray cluster") from None
    except ray.exceptions.RayActorError:
        if what != "down":
            raise TandemError("the cluster ended") from None
        refused, lines = "", []
    finally:
        ray.shutdown()
    if refused:
        raise TandemError(refused)
    return list(lines)
