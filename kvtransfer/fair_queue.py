"""A queue whose flows take turns. Pure."""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of one flow leave in the order they came; flows with items take turns, one item each.

    A flow that comes anew, or comes back, waits behind all flows that are there. So an item that is the n-th of its
    flow leaves after at most n items of every other flow. Not thread-safe.
    """

    def __init__(self) -> None:
        self._flows: OrderedDict[Hashable, deque[T]] = OrderedDict()  # whose turn it is comes first; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._flows.values()))

    def __bool__(self) -> bool:
        return bool(self._flows)

    def put(self, flow: Hashable, item: T) -> None:
        """Queue an item behind those of its flow."""
        self._flows.setdefault(flow, deque()).append(item)

    def peek(self) -> T:
        """What `pop` would take. Raises StopIteration when there is nothing."""
        return next(iter(self._flows.values()))[0]

    def pop(self) -> T:
        """Take the next item. Raises KeyError when there is none."""
        flow, items = self._flows.popitem(last=False)
        item = items.popleft()
        if items:
            self._flows[flow] = items
        return item

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Take out all that are unwanted; the others keep their order and their turns."""
        removed: list[T] = []
        for flow, items in list(self._flows.items()):
            removed += filter(unwanted, items)
            kept = deque(item for item in items if not unwanted(item))
            if kept:
                self._flows[flow] = kept
            else:
                del self._flows[flow]
        return removed
