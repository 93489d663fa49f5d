"""Tree of processes: those below one, by /proc, and the end of one with its parent."""

import ctypes
import signal
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Die with the thread that started this process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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
