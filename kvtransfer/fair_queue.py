"""A queue whose flows take turns.

Pure.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Queue with fairness between flows: FIFO within a flow, one item per flow in turn.

    A new or returning flow waits behind all present flows. So the n-th item of its flow leaves after at most n items of
    every other flow. Not thread-safe.
    """

    def __init__(self) -> None:
        self._flows: OrderedDict[Hashable, deque[T]] = OrderedDict()  # the next flow is first; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._flows.values()))

    def __bool__(self) -> bool:
        return bool(self._flows)

    def put(self, flow: Hashable, item: T) -> None:
        """Queue an item behind those of its flow."""
        self._flows.setdefault(flow, deque()).append(item)

    def peek(self) -> T:
        """Return the item that `pop` would take.

        Raises StopIteration when the queue is empty.
        """
        return next(iter(self._flows.values()))[0]

    def pop(self) -> T:
        """Take the next item. Raises KeyError when there is none."""
        flow, items = self._flows.popitem(last=False)
        item = items.popleft()
        if items:
            self._flows[flow] = items
        return item

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Remove and return all unwanted items; the others keep their order and turns."""
        removed: list[T] = []
        for flow, items in list(self._flows.items()):
            removed += filter(unwanted, items)
            kept = deque(item for item in items if not unwanted(item))
            if kept:
                self._flows[flow] = kept
            else:
                del self._flows[flow]
        return removed
