"""Room on a Ray cluster for the workers that `tandem up` starts with: one placement group, all of them or none."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import StartError
from tandem.ray_settings import RaySettings
from tandem.steps import Steps

AT_ONCE_S = 2.0
"""That room takes where there is some."""


class Group:
    """A bundle for each worker. One of a worker that left stays reserved, and is the next of its kind's: Ray gives
    nothing back of a group. Those that do not come from here are placed one by one."""

    def __init__(self, settings: RaySettings, modules: Sequence[str]) -> None:
        self._settings = settings
        self._modules = list(modules)
        self._free = list(range(len(self._modules)))
        self._group: PlacementGroup | None = None

    async def reserve(self, say: Steps) -> None:
        """Raises StartError when there is no room within `wait_s`, with what was wanted and what there is."""
        if not self._modules:
            return
        bundles = [self._settings.bundle(module) for module in self._modules]
        self._group = placement_group(bundles, strategy=self._settings.strategy)
        if await self._is_there(min(AT_ONCE_S, self._settings.wait_s)):
            return
        say(f"waiting for room on the Ray cluster: {_described(bundles)}")
        if not await self._is_there(self._settings.wait_s):
            self.remove()
            raise StartError("ray", self._no_room(bundles))

    def take(self, module: str) -> dict[str, Any]:
        """Options of an actor that runs `module`."""
        place = next((place for place in self._free if self._modules[place] == module), None)
        if self._group is None or place is None:
            return self._settings.options(module)
        self._free.remove(place)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        return self._settings.options(module) | {"scheduling_strategy": strategy}

    def give_back(self, options: dict[str, Any]) -> None:
        """Of a worker that is gone for good."""
        strategy = options["scheduling_strategy"]
        if isinstance(strategy, PlacementGroupSchedulingStrategy):
            self._free.append(strategy.placement_group_bundle_index)

    async def _is_there(self, within_s: float) -> bool:
        """Asked for a second at a time: a thread that waits cannot be cancelled."""
        give_up_at = time.monotonic() + within_s
        while (left_s := give_up_at - time.monotonic()) > 0:
            assert self._group is not None
            if await asyncio.to_thread(self._group.wait, min(1.0, left_s)):
                return True
        return False

    def remove(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _no_room(self, bundles: Sequence[dict[str, float]]) -> str:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        there = _described([{name: amount for name, amount in node.items() if _of_interest(name)} for node in nodes])
        return (
            f"no room within {self._settings.wait_s:g} s for {_described(bundles)}, {self._settings.strategy}; "
            f"the nodes have, used or not, {there}"
        )


def _of_interest(resource: str) -> bool:
    """Ray counts much beside."""
    return not resource.startswith(("node:", "accelerator_type:")) and resource not in ("memory", "object_store_memory")


def _described(bundles: Sequence[dict[str, float]]) -> str:
    """Like ones together: 2 x (GPU 1, fast_nic 1)."""
    texts = (", ".join(f"{name} {amount:g}" for name, amount in sorted(each.items())) for each in bundles)
    return ", ".join(f"{count} x ({text})" for text, count in Counter(texts).items())
