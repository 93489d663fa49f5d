"""Statistics of lookups in the pool and the stores below it, and of reads from other workers, since the start."""

from dataclasses import dataclass, field

POOL, HOST, DISK, STORE, REMOTE = "pool", "host", "disk", "store", "remote"
LOCAL = "local"
"""Host and disk together, the places of the local store; they are reported one by one."""
PINNED = "pinned"
"""Part of the pool that is reported like a tier: blocks that stay because a request asked for it."""


@dataclass(slots=True)
class KvStats:
    """Counters, updated on the engine's loop thread.

    A place is asked for those blocks of a prompt that no earlier one had, in the order pool, local, and then remote,
    which means another worker, or store, which workers share: for requests at admission, for loans at their start.
    """

    queries: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    """Blocks found, by tier; for `remote` and `store`, blocks that arrived and were verified."""
    read_bytes: int = 0
    """Bytes of the verified remote blocks."""
    num_mismatched: int = 0
    """Blocks from other workers that arrived with another fingerprint."""
    _read_s: float = 0.0
    _num_reading: int = 0
    _reading_since: float = 0.0

    def looked(self, tier: str, num_blocks: int, num_found: int) -> None:
        self.queries[tier] = self.queries.get(tier, 0) + num_blocks
        self.found(tier, num_found)

    def found(self, tier: str, num_blocks: int) -> None:
        """Count blocks found among those asked for."""
        self.hits[tier] = self.hits.get(tier, 0) + num_blocks

    def reads_begin(self, count: int, now: float) -> None:
        """Count reads from other workers that begin."""
        if not self._num_reading:
            self._reading_since = now
        self._num_reading += count

    def read_ends(self, now: float) -> None:
        """Count a read that is quiet, however it ended."""
        self._num_reading -= 1
        if not self._num_reading:
            self._read_s += now - self._reading_since

    def read_s(self, now: float) -> float:
        """Return the seconds during which at least one read was in flight."""
        return self._read_s + (now - self._reading_since if self._num_reading else 0.0)
