"""Which CPU cores an engine process uses, and how far it steps back behind others there."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from engine.errors import EngineStartError

AUTOGROUP = Path("/proc/self/autogroup")


def stay_on(cores: Sequence[int] | None) -> None:
    """This thread, which computes, and those that it makes. Threads that move KV, or wait for messages, take whatever
    core is idle. None: wherever it likes. Raises EngineStartError."""
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        raise EngineStartError("cores", f"this machine does not have all of {list(cores)}") from None


def step_back(niceness: int) -> None:
    """Get less of a core that others want too. Where Linux weighs sessions instead of processes (autogroup), this
    process becomes a session of its own to be weighed as one."""
    if not niceness:
        return
    os.nice(niceness)
    with contextlib.suppress(OSError):  # leads a session already, or there are no autogroups
        os.setsid()
    with contextlib.suppress(OSError):
        AUTOGROUP.write_text(str(niceness))
