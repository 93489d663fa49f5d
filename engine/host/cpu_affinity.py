"""CPU cores of an engine process, and its priority there."""

import contextlib
import math
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from engine.errors import EngineStartError
from engine.host.core_sharing import CoreShare

AUTOGROUP = Path("/proc/self/autogroup")
MAX_NICENESS = 19
CPUS = Path("/sys/devices/system/cpu")
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cores() -> list[int]:
    """Return the cores this process may use, in the machine's order, at most as many as its CPU quota covers.

    With a quota below the visible cores a random run of them is drawn, so that containers of one machine spread out.
    """
    cores = in_machine_order(os.sched_getaffinity(0))
    count = num_available()
    first = random.randrange(len(cores)) if count < len(cores) else 0
    drawn = (cores[first:] + cores[:first])[:count]
    return [core for core in cores if core in drawn]


def in_machine_order(cores: Iterable[int], root: Path = CPUS) -> list[int]:
    """Sort cores by distance: hardware threads of one core first, then cores of one socket.

    Many machines number threads the other way round, and engines with half of the numbers each would share all cores.
    By number where the system does not report topology.
    """
    return sorted(cores, key=lambda core: (*_place(root / f"cpu{core}/topology"), core))


def _place(topology: Path) -> tuple[int, int]:
    """Return socket and core of a hardware thread."""
    with contextlib.suppress(OSError, ValueError):
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text())
    return 0, 0


def num_available() -> int:
    """Return the number of cores whose time this process may use; more threads would only throttle each other."""
    seen = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return seen if quota is None else max(1, min(seen, math.ceil(quota)))


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> float | None:
    """Return the CPU quota of this process in cores, the smallest of its control groups; None without one."""
    quotas: list[float] = []
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                quotas += _quotas_of(root / controllers, path)
    return min(quotas, default=None)


def _quotas_of(base: Path, path: str) -> Iterator[float]:
    """Yield the quotas of a control group and its parents.

    Inside a container its own path may not exist, but the root of its hierarchy does.
    """
    group = base / path.lstrip("/")
    for folder in (group, *group.parents):
        if folder.is_relative_to(base) and (quota := _quota_of(folder)) is not None:
            yield quota


def _quota_of(folder: Path) -> float | None:
    """Return a folder's quota, for either version of control groups."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (word for name in names for word in (folder / name).read_text().split())
            if quota != "max" and int(quota) > 0:
                return int(quota) / int(period)
    return None


def stay_on(cores: Sequence[int]) -> None:
    """Bind every thread of this process to `cores`.

    Raises EngineStartError.
    """
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        raise EngineStartError("cores", f"this machine does not have all of {list(cores)}") from None


def settle_on(share: CoreShare, niceness: int) -> None:
    """Move every thread of this process to the share's own cores and set its niceness.

    Niceness is the share's above `niceness`, which the process began with (15 under Ray); raising priority again needs
    privileges and is not done. Raises OSError where the system refuses or lacks these cores.
    """
    settled: set[int] = set()
    # a thread that is not settled yet may start another
    while threads := set(map(int, os.listdir("/proc/self/task"))) - settled:
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):  # the thread has just ended
                os.sched_setaffinity(thread, share.own)
                _step_back(thread, min(niceness + share.niceness, MAX_NICENESS))
        settled |= threads
    if share.niceness:
        _weigh_alone(share.niceness)


def _step_back(thread: int, niceness: int) -> None:
    if niceness > os.getpriority(os.PRIO_PROCESS, thread):
        with contextlib.suppress(PermissionError):  # then both engines get equal parts of a shared core
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


def step_back(niceness: int) -> None:
    """Lower this process's priority on shared cores.

    Where Linux weighs sessions instead of processes (autogroup), the process becomes a session of its own.
    """
    if not niceness:
        return
    os.nice(niceness)
    _weigh_alone(niceness)


def _weigh_alone(niceness: int) -> None:
    with contextlib.suppress(OSError):  # a session leader already, or no autogroups
        os.setsid()
    with contextlib.suppress(OSError):
        AUTOGROUP.write_text(str(niceness))
