"""Main memory that is left, on the host and within the limit of a container's cgroup."""

import errno
import os
from pathlib import Path
from typing import NamedTuple

CGROUP = Path("/sys/fs/cgroup")
"""Root of the cgroup that a container sees as its own."""
MEMINFO = Path("/proc/meminfo")
FILES = (
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
)
"""Files of limit, usage and statistics, and the prefix of names in the last: of cgroup v2, then v1."""


class CgroupMemory(NamedTuple):
    """Limit and usage of a cgroup, in bytes."""

    limit: int
    usage: int
    inactive_file: int
    """Part of the usage that is cached pages of files, and the first to be dropped."""
    active_file: int
    folder: Path


def cgroup_memory(root: Path) -> CgroupMemory | None:
    """Return the memory of the cgroup at `root`; None where there is no limit below the host's memory."""
    for limit_file, usage_file, stat_file, prefix in FILES:
        try:
            limit, usage = int((root / limit_file).read_text()), int((root / usage_file).read_text())
            stats = dict(line.split() for line in (root / stat_file).read_text().splitlines())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if limit >= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            return None
        inactive, active = (int(stats.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active"))
        return CgroupMemory(limit, usage, inactive, active, (root / limit_file).parent)
    return None


def check_fits(num_bytes: int) -> None:
    """Check that so much memory is left, before it is allocated.

    Where the system overcommits, as kubelet has its nodes do, an allocation that is too large succeeds, and the system
    kills whoever writes it. Raises OSError.
    """
    left = []
    if (cgroup := cgroup_memory(CGROUP)) is not None:
        free = cgroup.limit - cgroup.usage + cgroup.inactive_file + cgroup.active_file
        left.append((free, f"its container's limit of {cgroup.limit >> 20} MiB leaves"))
    try:
        lines = MEMINFO.read_text().splitlines()
        left += [(int(line.split()[1]) << 10, "this host has") for line in lines if line.startswith("MemAvailable:")]
    except OSError:  # another system than Linux: its own answer to the allocation counts
        pass
    for free, where in sorted(left)[:1]:
        if num_bytes > free:
            raise OSError(errno.ENOMEM, f"{num_bytes >> 20} MiB do not fit: {where} {max(0, free) >> 20} MiB")
