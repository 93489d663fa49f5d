"""Other engines of this host that compute on its CPU cores, and which of those that leaves to this one.

Each engine holds an abstract Unix socket whose name is its claim (`core_sharing.py`). Nobody connects to it: that it is
there is all it says. The kernel lists the names, and takes one away with its process, however that ends. So there is
nobody who deals out cores, no file that outlives anybody, and engines started by Ray, by hand or in containers of one
network namespace find each other. Engines in others do not; there containers have their limits.
"""

import logging
import os
import re
import socket
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from cluster.roles import Role
from engine.config import WorkerConfig
from engine.host.core_sharing import CoreClaim, CoreShare, own_share
from engine.host.cpu_affinity import in_machine_order, num_available, settle_on

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
LEAST_BETWEEN_LOOKS = 50
"""Of what a look took: the kernel lists all sockets of the namespace, which may be very many."""
MAX_HEEDED = 1024
"""Anybody may write claims, and each has to be read."""
SOCKETS = Path("/proc/self/net/unix")
NAME = "tandem-cores-1-"
"""And its version: engines of another one are not heeded."""
_LISTED = re.compile(rb" @" + NAME.encode() + rb"(\S+)$", re.MULTILINE)


class CoreAllocation:
    """As one engine sees them. Used by one thread."""

    def __init__(self, role: Role, told: Sequence[int]) -> None:
        """`told`: cores that it was told to use; none: whatever it may. Raises OSError where there are no such sockets,
        or no list of them."""
        self._role = role
        self._told = self._apart = bool(told)
        """Whether others are to make room for it, and whether it need not for them."""
        self._niceness = os.getpriority(os.PRIO_PROCESS, os.getpid())
        self._since = time.monotonic_ns()
        self._socket: socket.socket | None = None
        self._claim(tuple(sorted(told)) or _allowed())
        _read_claims()
        self._share: CoreShare | None = None
        self._look_at = 0.0

    def settle(self) -> CoreShare | None:
        """This engine's share, on which all threads of its process are then; None where it has none of its own, or is
        where it was when last asked. The others are looked at once a second."""
        if self._apart or (began_at := time.monotonic()) < self._look_at:
            return None
        try:
            share = self._look()
            if share != self._share:
                settle_on(share, self._niceness)
        except OSError as error:  # it still computes, where the system puts it
            log.warning("cannot keep off other engines' cores: %s", error)
            self._leave()
            self._apart = True
            return None
        self._look_at = began_at + max(LOOK_EVERY_S, LEAST_BETWEEN_LOOKS * (time.monotonic() - began_at))
        if share == self._share:
            return None
        self._share = share
        log.info("computes on %s", share)
        return share

    def _look(self) -> CoreShare:
        here = _allowed()
        if self._share is not None and set(here) != set(self._share.own):  # somebody else has moved it
            if here != self._own.cores:
                self._claim(here)
            self._share = None
        return own_share(self._own, _read_claims(), self._in_order)

    def _claim(self, cores: tuple[int, ...]) -> None:
        claim = CoreClaim(self._since, os.getpid(), self._role, self._told, cores)
        claimed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claimed.bind(f"\0{NAME}{claim}".encode())
        except OSError:
            claimed.close()
            raise
        self._leave()  # as what it was
        self._own, self._socket = claim, claimed
        self._in_order = in_machine_order(cores)

    def _leave(self) -> None:
        if self._socket is not None:
            self._socket.close()


def finds_own_cores(config: WorkerConfig) -> bool:
    """Whether an engine with such settings is to say what it is: told its cores, it is avoided; told nothing, it also
    avoids. A container with time for fewer cores than it sees cannot know which of them others leave to it."""
    if config.engine != "torch":
        return False
    if config.cores:
        return True
    return (config.threads, config.tensor_parallel) == (None, 1) and num_available() >= len(os.sched_getaffinity(0))


def _read_claims() -> list[CoreClaim]:
    listed = islice(_LISTED.finditer(SOCKETS.read_bytes()), MAX_HEEDED)
    names = (found[1].decode(errors="replace") for found in listed)
    return [claim for name in names if (claim := CoreClaim.parse(name)) is not None]


def _allowed() -> tuple[int, ...]:
    """By the process's main thread: others are bound more narrowly."""
    return tuple(sorted(os.sched_getaffinity(os.getpid())))
