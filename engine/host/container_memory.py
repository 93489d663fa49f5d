"""Memory that a worker alone in its container may still take, by the container's cgroup."""

import os
from pathlib import Path

from cluster.process.tree import descendants

CGROUP = Path("/sys/fs/cgroup")
"""Root of the cgroup that a container sees as its own."""
FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Files of limit, usage and statistics, and the statistic of cached file pages: of cgroup v2, then v1."""


def container_memory(root: Path = CGROUP) -> tuple[int, int] | None:
    """Return (limit, free) in bytes of the cgroup at `root`.

    None where there is no limit, or where other processes than this one's parent and its children share it: then
    nobody can tell which part of the memory is this worker's.
    """
    for limit_file, usage_file, stat_file, cached_name in FILES:
        try:
            limit, usage = int((root / limit_file).read_text()), int((root / usage_file).read_text())
            stats = dict(line.split() for line in (root / stat_file).read_text().splitlines())
            members = {int(pid) for pid in (root / Path(limit_file).parent / "cgroup.procs").read_text().split()}
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if limit >= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") or not members <= {
            os.getppid(),
            *descendants(os.getppid()),
        }:
            return None
        return limit, limit - usage + int(stats.get(cached_name, 0))
    return None
