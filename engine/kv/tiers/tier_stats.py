"""What the tiers did, for reports and for whoever weighs fetching against computing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierStats:
    """What is held now, and what happened since the start."""

    host_blocks: int
    host_bytes: int
    disk_blocks: int
    disk_bytes: int
    put: int
    """Blocks copied into the host tier."""
    dropped: int
    """Blocks that could not be put, since every host slot was being written, read or pinned."""
    unwritten: int
    """Blocks that could not be written to disk: an error, or every disk slot was being written or read."""
    rejected: int
    """Blocks forgotten, unreadable, or found torn when the file was opened."""
    host_hits: int
    """Blocks read from the host tier."""
    disk_hits: int
    host_read_bytes: int
    host_read_s: float
    """The reader's `write` is part of it, here and for the disk."""
    disk_read_bytes: int
    disk_read_s: float
