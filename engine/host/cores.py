"""CPU cores of this host's engines: their agreement through claims, their shares, and each one's affinity and priority.

Each engine holds an abstract Unix socket whose name is its claim. No process connects to it: its
existence is the message. The kernel lists the names, and removes a name with its process, however that ends. So no
process deals out cores, no file outlives its owner, and engines started by Ray, by hand or in containers of one network
namespace find each other. Engines in other namespaces do not; there containers have CPU limits.

Engines on the same cores slow each other several times over. A launcher that starts all engines at once may tell each
its cores (`tandem demo`). Otherwise each engine publishes a `CoreClaim`, all compute the same shares from the same
claims, and each takes its own.
"""

import contextlib
import logging
import math
import os
import random
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from cluster.roles import ROLES, Role
from engine.errors import EngineStartError

log = logging.getLogger(__name__)


DECODE_NICENESS = 3
"""Niceness that gives a decode engine a third of a core shared with a prefill engine. Measured: docs/log.md."""
MAX_CORE = 8191
"""Largest core number that is accepted; more than Linux supports."""
_RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4})(?:/([0-9]{1,4}))?)?")


@dataclass(frozen=True, slots=True)
class CoreShare:
    """Share of one engine."""

    own: tuple[int, ...]
    shared: tuple[int, ...] = ()
    """Cores of other engines on which this one computes as well."""
    niceness: int = 0

    def __str__(self) -> str:
        beyond = f", and on {as_ranges(self.shared)} of others" if self.shared else ""
        return f"cores {as_ranges(self.own)}{beyond}"


def share_cores(cores: Sequence[int], roles: Sequence[Role]) -> list[CoreShare]:
    """Return the shares of engines with these roles, one each.

    Own cores are disjoint and as equal as possible, in the order of `cores` (see `in_machine_order`), prefill engines
    first; engines beyond the number of cores share one each.

    Prefill engines also compute on decode engines' cores, each of which is lent to one of them. A decode step mostly
    waits for weights from memory, and a prompt is soon over: prefill gets more of a shared core, or prompts would queue
    behind streams that are faster than a person reads.
    """
    prefill = [number for number, role in enumerate(roles) if role == "prefill"]
    decode = [number for number, role in enumerate(roles) if role == "decode"]
    own = dict(zip([*prefill, *decode], _disjoint(cores, len(roles)), strict=True))
    prefilled_on = {core for number in prefill for core in own[number]}
    lent = [core for number in decode for core in own[number] if core not in prefilled_on]
    shared = {number: tuple(lent[place :: len(prefill)]) for place, number in enumerate(prefill)}
    niceness = DECODE_NICENESS if prefill else 0
    return [
        CoreShare(own[number], shared.get(number, ()), 0 if role == "prefill" else niceness)
        for number, role in enumerate(roles)
    ]


def _disjoint(cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    if count >= len(cores):
        return [(cores[number % len(cores)],) for number in range(count)]
    each, extra = divmod(len(cores), count)
    shares: list[tuple[int, ...]] = []
    start = 0
    for number in range(count):
        end = start + each + (number < extra)
        shares.append(tuple(cores[start:end]))
        start = end
    return shares


class CoreClaim(NamedTuple):
    """Claim that an engine publishes to others on its host.

    Claims are ordered by role, then by these fields.
    """

    since: int
    """Start time in nanoseconds since the host booted."""
    pid: int
    role: Role
    told: bool
    """Whether `cores` were told to the engine; otherwise they are the ones it may use."""
    cores: tuple[int, ...]
    """Cores in ascending order."""

    def __str__(self) -> str:
        kind = "told" if self.told else "shares"
        return f"{self.role}-{kind}-{self.since}-{self.pid}-{as_ranges(self.cores)}"

    @classmethod
    def parse(cls, text: str) -> "CoreClaim | None":
        """Parse a claim; None for any other text, since any process may write one."""
        role, _, rest = text.partition("-")
        kind, _, rest = rest.partition("-")
        since, _, rest = rest.partition("-")
        pid, _, ranges = rest.partition("-")
        cores = from_ranges(ranges)
        if role not in ROLES or kind not in ("told", "shares") or not cores:
            return None
        if not all(number.isascii() and number.isdigit() for number in (since, pid)):
            return None
        return cls(int(since), int(pid), role, kind == "told", cores)


def own_share(own: CoreClaim, claims: Iterable[CoreClaim], in_order: Sequence[int]) -> CoreShare:
    """Return the share of an engine that was told nothing.

    Cores told to other engines are theirs, and so are those of engines restricted to a part of this engine's cores,
    while that leaves any. All engines that may use the same cores share the rest. `in_order`: this engine's cores in
    the order in which they are shared out.
    """
    claims = set(claims)
    may_use = set(own.cores)
    taken = {core for claim in claims if claim.told or may_use > set(claim.cores) for core in claim.cores}
    peers = sorted(claim for claim in claims | {own} if not claim.told and claim.cores == own.cores)
    free = [core for core in in_order if core not in taken] or in_order
    return share_cores(free, [peer.role for peer in peers])[peers.index(own)]


def as_ranges(cores: Iterable[int]) -> str:
    """Format cores as Linux does, 0-3,8, and 0-6/2 for every second one."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        last = runs[-1] if runs else []
        if len(last) == 1 or (len(last) > 1 and core - last[-1] == last[1] - last[0]):
            last.append(core)
        else:
            runs.append([core])
    return ",".join(text for run in runs for text in _as_texts(run))


def _as_texts(run: list[int]) -> list[str]:
    first, last = run[0], run[-1]
    step = run[1] - first if len(run) > 1 else 0
    if step == 1:
        return [f"{first}-{last}"]
    return [f"{first}-{last}/{step}"] if len(run) > 2 else [str(core) for core in run]


def from_ranges(text: str) -> tuple[int, ...]:
    """Parse the result of `as_ranges`; empty for any other text."""
    cores: list[int] = []
    for part in text.split(","):
        if (match := _RANGE.fullmatch(part)) is None:
            return ()
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if not first <= last <= MAX_CORE or step < 1 or (cores and first <= cores[-1]):
            return ()
        cores += range(first, last + 1, step)
    return tuple(cores)


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

    Niceness is the share's above `niceness`, which the process began with; raising priority again needs privileges
    and is not done. Raises OSError where the system refuses or lacks these cores.
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


LOOK_EVERY_S = 1.0
LEAST_BETWEEN_LOOKS = 50
"""Smallest interval between lookups, as a multiple of a lookup's duration: the kernel lists all sockets of the
namespace, possibly very many."""
MAX_HEEDED = 1024
"""Largest number of claims read, since any process may write claims."""
SOCKETS = Path("/proc/self/net/unix")
NAME = "tandem-cores-1-"
"""Prefix of claims, with its version; claims of other versions are ignored."""
_LISTED = re.compile(rb" @" + NAME.encode() + rb"(\S+)$", re.MULTILINE)


class CoreAllocation:
    """Core allocation as one engine sees it.

    Used by one thread.
    """

    def __init__(self, role: Role, cores: Sequence[int]) -> None:
        """Join the allocation.

        `cores` are the cores that a setting names; empty: all it may use.

        Raises OSError where there are no such sockets, or no list of them.
        """
        self._role = role
        self._explicit = self._apart = bool(cores)
        """Whether others are to make room for it, and whether it need not for them."""
        self._niceness = os.getpriority(os.PRIO_PROCESS, os.getpid())
        self._since = time.monotonic_ns()
        self._socket: socket.socket | None = None
        self._claim(tuple(sorted(cores)) or _allowed())
        _read_claims()
        self._share: CoreShare | None = None
        self._look_at = 0.0

    def settle(self) -> CoreShare | None:
        """Move all threads of this process to this engine's share and return it, looking at the others once a second.

        Returns None when it has no share of its own, or when the share is unchanged.
        """
        if self._apart or (began_at := time.monotonic()) < self._look_at:
            return None
        try:
            share = self._look()
            if share != self._share:
                settle_on(share, self._niceness)
        except OSError as error:  # it still computes, on the cores where the system puts it
            log.warning("cannot avoid the cores of other engines: %s", error)
            self._leave()
            self._apart = True
            return None
        self._look_at = began_at + max(LOOK_EVERY_S, LEAST_BETWEEN_LOOKS * (time.monotonic() - began_at))
        if share == self._share:
            return None
        self._share = share
        log.info("the engine computes on %s", share)
        return share

    def _look(self) -> CoreShare:
        here = _allowed()
        if self._share is not None and set(here) != set(self._share.own):  # another process has moved it
            if here != self._own.cores:
                self._claim(here)
            self._share = None
        return own_share(self._own, _read_claims(), self._in_order)

    def _claim(self, cores: tuple[int, ...]) -> None:
        claim = CoreClaim(self._since, os.getpid(), self._role, self._explicit, cores)
        claimed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claimed.bind(f"\0{NAME}{claim}".encode())
        except OSError:
            claimed.close()
            raise
        self._leave()  # withdraw the old claim
        self._own, self._socket = claim, claimed
        self._in_order = in_machine_order(cores)

    def _leave(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _read_claims() -> list[CoreClaim]:
    listed = islice(_LISTED.finditer(SOCKETS.read_bytes()), MAX_HEEDED)
    names = (match[1].decode(errors="replace") for match in listed)
    return [claim for name in names if (claim := CoreClaim.parse(name)) is not None]


def _allowed() -> tuple[int, ...]:
    """Return the cores allowed to the process's main thread; other threads are bound more narrowly."""
    return tuple(sorted(os.sched_getaffinity(os.getpid())))
