"""Which CPU cores an engine process uses, and how far it steps back behind others there."""

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
    """Those this process may use, in the machine's order: as many as its control group has time for, which may be fewer
    than it sees. A run of those then, drawn anew for each process: other containers of the machine draw theirs."""
    cores = in_machine_order(os.sched_getaffinity(0))
    count = num_available()
    first = random.randrange(len(cores)) if count < len(cores) else 0
    drawn = (cores[first:] + cores[:first])[:count]
    return [core for core in cores if core in drawn]


def in_machine_order(cores: Iterable[int], root: Path = CPUS) -> list[int]:
    """Neighbours are near each other: hardware threads of one core first, then cores of one socket. Many machines
    number them the other way, and engines that got a half of the numbers each would share all cores. By number where
    the system does not say."""
    return sorted(cores, key=lambda core: (*_place(root / f"cpu{core}/topology"), core))


def _place(topology: Path) -> tuple[int, int]:
    """Socket and core."""
    with contextlib.suppress(OSError, ValueError):
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text())
    return 0, 0


def num_available() -> int:
    """Cores whose time this process may use. More threads than that would only be stopped in turn."""
    seen = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return seen if quota is None else max(1, min(seen, math.ceil(quota)))


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> float | None:
    """Cores' time that a container's limit allows, None without one: of this process's control groups the least."""
    quotas: list[float] = []
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                quotas += _quotas_of(root / controllers, path)
    return min(quotas, default=None)


def _quotas_of(base: Path, path: str) -> Iterator[float]:
    """Of a control group and those it is in. In a container its own path may be none there, but its root is."""
    group = base / path.lstrip("/")
    for folder in (group, *group.parents):
        if folder.is_relative_to(base) and (quota := _quota_of(folder)) is not None:
            yield quota


def _quota_of(folder: Path) -> float | None:
    """By either version of control groups."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (word for name in names for word in (folder / name).read_text().split())
            if quota != "max" and int(quota) > 0:
                return int(quota) / int(period)
    return None


def stay_on(cores: Sequence[int]) -> None:
    """Every thread of this process, from now on. Raises EngineStartError."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        raise EngineStartError("cores", f"this machine does not have all of {list(cores)}") from None


def settle_on(share: CoreShare, niceness: int) -> None:
    """Every thread of this process is on the share's own cores from now on, until it is bound more narrowly, and steps
    back as the share says from `niceness`, which is what it began with (15 under Ray). It does not come forward again:
    that is not for everybody to do. Raises OSError where the system does not let it, or has none of these cores."""
    settled: set[int] = set()
    while found := set(map(int, os.listdir("/proc/self/task"))) - settled:  # one not settled yet may start another
        for thread in found:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(thread, share.own)
                _step_back(thread, min(niceness + share.niceness, MAX_NICENESS))
        settled |= found
    if share.niceness:
        _weigh_alone(share.niceness)


def _step_back(thread: int, niceness: int) -> None:
    if niceness > os.getpriority(os.PRIO_PROCESS, thread):
        with contextlib.suppress(PermissionError):  # then both get the same of a core that they share
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


def step_back(niceness: int) -> None:
    """Get less of a core that others want too. Where Linux weighs sessions instead of processes (autogroup), this
    process becomes a session of its own to be weighed as one."""
    if not niceness:
        return
    os.nice(niceness)
    _weigh_alone(niceness)


def _weigh_alone(niceness: int) -> None:
    with contextlib.suppress(OSError):  # leads a session already, or there are no autogroups
        os.setsid()
    with contextlib.suppress(OSError):
        AUTOGROUP.write_text(str(niceness))
