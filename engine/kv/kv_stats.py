"""What became of looking for KV in each tier, and of reading it from other workers; since the engine started."""

from dataclasses import dataclass, field

POOL, HOST, DISK, REMOTE = "pool", "host", "disk", "remote"


@dataclass(slots=True)
class KvStats:
    """Counted by whoever looks; on the engine's loop thread.

    A tier is asked for the blocks of a prompt that no tier before it had, in the order pool, host, disk, remote: of
    requests as they are admitted, and of loans as they start. `remote` are blocks that another worker is asked for."""

    queries: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    """Blocks that were found; of `remote` those that came and were verified."""
    read_bytes: int = 0
    """Of those."""
    num_mismatched: int = 0
    """Blocks from other workers that came with another fingerprint."""
    _read_s: float = 0.0
    _num_reading: int = 0
    _reading_since: float = 0.0

    def looked(self, tier: str, num_blocks: int, num_found: int) -> None:
        self.queries[tier] = self.queries.get(tier, 0) + num_blocks
        self.found(tier, num_found)

    def found(self, tier: str, num_blocks: int) -> None:
        """Of those that it was asked for before."""
        self.hits[tier] = self.hits.get(tier, 0) + num_blocks

    def reads_begin(self, count: int, now: float) -> None:
        """From other workers."""
        if not self._num_reading:
            self._reading_since = now
        self._num_reading += count

    def read_ends(self, now: float) -> None:
        """It is quiet, however it ended."""
        self._num_reading -= 1
        if not self._num_reading:
            self._read_s += now - self._reading_since

    def read_s(self, now: float) -> float:
        """Time in which one read or more was under way; time in which several were counts once."""
        return self._read_s + (now - self._reading_since if self._num_reading else 0.0)
