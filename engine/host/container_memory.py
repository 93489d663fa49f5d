"""Memory that a worker alone in its container may still take, by the container's cgroup."""

import os
from pathlib import Path

from cluster.process.tree import descendants
from kvtransfer.hardware.main_memory import CGROUP, cgroup_memory


def container_memory(root: Path = CGROUP) -> tuple[int, int] | None:
    """Return (limit, free) in bytes of the cgroup at `root`.

    None where there is no limit, or where other processes than this one's parent and its children share it: then
    nobody can tell which part of the memory is this worker's.
    """
    if (memory := cgroup_memory(root)) is None:
        return None
    try:
        members = {int(pid) for pid in (memory.folder / "cgroup.procs").read_text().split()}
    except (OSError, ValueError):
        return None
    if not members <= {os.getppid(), *descendants(os.getppid())}:
        return None
    return memory.limit, memory.limit - memory.usage + memory.inactive_file
