"""A store in this process: its objects are a dictionary, and its threads work when a test says so."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.kv_stats import HOST
from kvcache.store.block_store import BlockStore
from kvcache.store.kv_store import LocalObjects, ObjectFormat, ObjectMissing, Objects, PlaceUse, ReadFailure, StoreError


class MemoryObjects(LocalObjects):
    """Objects of all stores that share them, which a test may damage, remove or make unreachable."""

    identity = "memory"

    def __init__(self, reads_at_once: int = 4, max_objects: int = 1 << 30) -> None:
        self.reads_at_once = reads_at_once
        self.max_objects = max_objects
        self.stored: dict[str, bytes] = {}
        """The longest unused first."""
        self.broken = False
        self.num_read = 0

    def held(self, names: Sequence[str]) -> list[bool]:
        self._check()
        return [name in self.stored for name in names]

    def read(self, names: Sequence[str], into: Sequence[NDArray[np.uint8]]) -> list[ReadFailure | None]:
        failures: list[ReadFailure | None] = []
        for name, row in zip(names, into, strict=True):
            stored = self.stored.get(name)
            if self.broken:
                failures.append(StoreError("it is broken"))
            elif stored is None or len(stored) != len(row):
                failures.append(ObjectMissing(name))
            else:
                row[:] = np.frombuffer(stored, np.uint8)
                self.num_read += 1
                failures.append(None)
        return failures

    def write(self, name: str, stored: NDArray[np.uint8]) -> None:
        self._check()
        self.stored[name] = stored.tobytes()

    def remove(self, name: str) -> None:
        self._check()
        self.stored.pop(name, None)

    def used(self, name: str) -> None:
        if (stored := self.stored.pop(name, None)) is not None:
            self.stored[name] = stored

    def trim(self, name: str) -> list[str]:
        self._check()
        gone = list(self.stored)[: max(0, len(self.stored) - self.max_objects)]
        for each in gone:
            del self.stored[each]
        return gone

    def heads(self, folder: str, num_bytes: int) -> Iterator[tuple[str, bytes]]:
        self._check()
        return iter([(name, stored[:num_bytes]) for name, stored in self.stored.items()])

    def places(self) -> list[PlaceUse]:
        return [PlaceUse(HOST, self.max_objects, len(self.stored), self.num_read)]

    def _check(self) -> None:
        if self.broken:
            raise StoreError("it is broken")


class StepExecutor(Executor):
    """Performs one call at a time, when told to."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def step(self) -> bool:
        """Perform the next call; False when there is none."""
        if not self.waiting:
            return False
        future, call = self.waiting.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
        return True


class StepStore(BlockStore):
    """A store whose reads and writes happen in `step`."""

    def __init__(
        self, objects: Objects, object_format: ObjectFormat, clock: Callable[[], float], **options: Any
    ) -> None:
        self.objects, self.object_format = objects, object_format
        self.readers, self.writers = StepExecutor(), StepExecutor()
        super().__init__(objects, object_format, clock=clock, executors=(self.readers, self.writers), **options)

    def step(self) -> bool:
        """One read or write; False when there is none."""
        return self.readers.step() or self.writers.step()

    @property
    def is_busy(self) -> bool:
        return bool(self.readers.waiting or self.writers.waiting)

    def settle(self) -> None:
        while self.step():
            pass
