"""Which worker holds which block: exact, from the workers' own events. Pure."""

from collections.abc import Iterable, Sequence

from engine.keys import BlockKey


class PrefixIndex:
    """Block keys of all workers. A worker unknown here holds nothing."""

    def __init__(self) -> None:
        self._holders: dict[BlockKey, set[str]] = {}
        self._held: dict[str, set[BlockKey]] = {}

    @property
    def num_keys(self) -> int:
        return len(self._holders)

    def add(self, worker_id: str, keys: Iterable[BlockKey]) -> None:
        """`worker_id` holds these blocks now."""
        held = self._held.setdefault(worker_id, set())
        for key in keys:
            held.add(key)
            self._holders.setdefault(key, set()).add(worker_id)

    def discard(self, worker_id: str, keys: Iterable[BlockKey]) -> None:
        """`worker_id` no longer holds these blocks."""
        held = self._held.get(worker_id, set())
        for key in keys:
            if key in held:
                held.remove(key)
                self._drop(worker_id, key)

    def drop_worker(self, worker_id: str) -> None:
        """`worker_id` is gone, or will say all it holds anew."""
        for key in self._held.pop(worker_id, ()):
            self._drop(worker_id, key)

    def keys_of(self, worker_id: str) -> frozenset[BlockKey]:
        return frozenset(self._held.get(worker_id, ()))

    def match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """For each worker that holds a prefix of `keys`, how many of its blocks; the others are left out."""
        matched: dict[str, int] = {}
        alive: set[str] | None = None
        for depth, key in enumerate(keys, start=1):
            holders = self._holders.get(key)
            if not holders:
                break
            alive = set(holders) if alive is None else alive & holders
            if not alive:
                break
            for worker_id in alive:
                matched[worker_id] = depth
        return matched

    def _drop(self, worker_id: str, key: BlockKey) -> None:
        holders = self._holders[key]
        holders.remove(worker_id)
        if not holders:
            del self._holders[key]
