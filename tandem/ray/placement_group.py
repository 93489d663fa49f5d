"""Resources on a Ray cluster for the initial workers of `tandem up`: one placement group, all or none."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import StartError
from tandem.progress import ProgressSteps
from tandem.ray.settings import RaySettings

AT_ONCE_S, LOOK_EVERY_S = 2.0, 0.2
"""Seconds within which available resources are granted, and between looks at whether they are."""
MEANING = {"STRICT_SPREAD": " (each on a node of its own)", "STRICT_PACK": " (all on one node)"}


class WorkerGroup:
    """A bundle for each worker.

    A departed worker's bundle stays reserved for the next one of its kind.

    Ray releases a group only as a whole, which happens when no worker is left in it. Further workers are placed one by
    one.
    """

    def __init__(self, settings: RaySettings, modules: Sequence[str]) -> None:
        self._settings = settings
        self._modules = list(modules)
        self._free = list(range(len(self._modules)))
        self._group: PlacementGroup | None = None
        self._single: list[PlacementGroup] = []
        """Groups of one bundle each."""

    async def reserve(self, say: ProgressSteps) -> None:
        """Reserve the group.

        Raises StartError when resources are missing for `wait_s`, with what is wanted and available.
        """
        if not self._modules:
            return
        bundles = [self._settings.bundle(module) for module in self._modules]
        self._group = placement_group(bundles, strategy=self._settings.strategy)
        if await _is_there(self._group, min(AT_ONCE_S, self._settings.wait_s)):
            return
        say(f"waiting for room on the Ray cluster: {_described(bundles)}")
        if not await _is_there(self._group, self._settings.wait_s):
            self.remove()
            raise StartError("ray", self._no_room(bundles))

    def take(self, module: str) -> dict[str, Any]:
        """Return options of an actor that runs `module`."""
        place = self._free_place(module)
        if self._group is None or place is None:
            return self._settings.options(module)
        self._free.remove(place)
        return self._in_group(module, self._group, place)

    async def spare(self, module: str) -> dict[str, Any] | None:
        """Return options of one more actor where resources are free now; None otherwise.

        A strict strategy holds for workers of the group only.
        """
        granted = set() if self._group is None else await _granted(self._group)
        for place in self._free:
            if self._group is not None and self._modules[place] == module and place in granted:
                self._free.remove(place)
                return self._in_group(module, self._group, place)
        if self._settings.strategy.startswith("STRICT"):
            return None
        if not self._settings.wants(module):
            return self._settings.options(module)
        group = placement_group([self._settings.bundle(module)])
        if not await _is_there(group, AT_ONCE_S):
            remove_placement_group(group)
            return None
        self._single.append(group)
        return self._in_group(module, group, 0)

    async def room(self, module: str, options: dict[str, Any]) -> dict[str, Any] | None:
        """Return options for a worker that is to start: its own, or others where resources are free; None otherwise.

        Ray places all lost bundles of a group together. A worker whose own bundle would fit must not wait for others'.
        """
        give_up_at = time.monotonic() + AT_ONCE_S
        while not await self.has_place(options):
            if time.monotonic() > give_up_at:
                return await self.spare(module)
            await asyncio.sleep(LOOK_EVERY_S)
        return options

    async def has_place(self, options: dict[str, Any]) -> bool:
        """Return whether a worker's bundle is on a node; True for workers that Ray places without one."""
        strategy = options["scheduling_strategy"]
        if not isinstance(strategy, PlacementGroupSchedulingStrategy):
            return True
        return strategy.placement_group_bundle_index in await _granted(strategy.placement_group)

    def give_back(self, options: dict[str, Any]) -> None:
        """Return the resources of a worker that is gone for good."""
        strategy = options["scheduling_strategy"]
        if not isinstance(strategy, PlacementGroupSchedulingStrategy):
            return
        if strategy.placement_group in self._single:
            self._single.remove(strategy.placement_group)
            remove_placement_group(strategy.placement_group)
            return
        self._free.append(strategy.placement_group_bundle_index)
        if self._group is not None and len(self._free) == len(self._modules):
            remove_placement_group(self._group)
            self._group = None

    def remove(self) -> None:
        for group in (*self._single, self._group):
            if group is not None:
                remove_placement_group(group)
        self._single, self._group = [], None

    def _free_place(self, module: str) -> int | None:
        return next((place for place in self._free if self._modules[place] == module), None)

    def _in_group(self, module: str, group: PlacementGroup, place: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
        return self._settings.options(module) | {"scheduling_strategy": strategy}

    def _no_room(self, bundles: Sequence[dict[str, float]]) -> str:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        resources = _described(
            [{name: amount for name, amount in node.items() if _of_interest(name)} for node in nodes]
        )
        return (
            f"no room within {self._settings.wait_s:g} s for {_described(bundles)}, {self._settings.strategy}"
            f"{MEANING.get(self._settings.strategy, '')}; "
            f"the nodes have, used or not, {resources}"
        )


async def _granted(group: PlacementGroup) -> set[int]:
    """Return the bundles that are on a node, by their index."""
    table = await asyncio.to_thread(placement_group_table, group)
    return {index for index, node in table["bundles_to_node_id"].items() if node}


async def _is_there(group: PlacementGroup, within_s: float) -> bool:
    """Wait for a group, a second at a time: a waiting thread cannot be cancelled."""
    give_up_at = time.monotonic() + within_s
    while (left_s := give_up_at - time.monotonic()) > 0:
        if await asyncio.to_thread(group.wait, min(1.0, left_s)):
            return True
    return False


def _of_interest(resource: str) -> bool:
    """Return whether a resource is worth printing; Ray counts many others."""
    return not resource.startswith(("node:", "accelerator_type:")) and resource not in ("memory", "object_store_memory")


def _described(bundles: Sequence[dict[str, float]]) -> str:
    """Describe bundles with equal ones together: 2 x (GPU 1, fast_nic 1)."""
    texts = (", ".join(f"{name} {amount:g}" for name, amount in sorted(each.items())) for each in bundles)
    return ", ".join(f"{count} x ({text})" for text, count in Counter(texts).items())
