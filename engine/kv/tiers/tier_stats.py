"""Statistics of the tiers, for reports and for the choice between restoring and computing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierStats:
    """Present contents of the tiers, and counters since the start."""

    host_blocks: int
    host_bytes: int
    disk_blocks: int
    disk_bytes: int
    put: int
    """Blocks copied into the host tier."""
    dropped: int
    """Blocks dropped because every host slot was being written, read or pinned."""
    unwritten: int
    """Blocks not written to disk: an error, or every disk slot was being written or read."""
    rejected: int
    """Blocks forgotten, unreadable, or found torn when the file was opened."""
    host_hits: int
    """Blocks read from the host tier."""
    disk_hits: int
    host_read_bytes: int
    host_read_s: float
    """Seconds of reads from the host tier; the caller's `write` is included, here and for the disk."""
    disk_read_bytes: int
    disk_read_s: float
