"""Processes below a process, by /proc."""

from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """Return the process ids of a process's children; none of one that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def descendants(pid: int) -> list[int]:
    """Return the process ids of all children of a process, and theirs."""
    pids = [pid]
    for each in pids:
        pids += children(each)
    return pids[1:]
