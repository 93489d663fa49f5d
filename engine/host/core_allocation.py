"""Agreement of this host's engines about CPU cores, through the claims of the others.

Each engine holds an abstract Unix socket whose name is its claim (`core_sharing.py`). No process connects to it: its
existence is the message. The kernel lists the names, and removes a name with its process, however that ends. So no
process deals out cores, no file outlives its owner, and engines started by Ray, by hand or in containers of one network
namespace find each other. Engines in other namespaces do not; there containers have CPU limits.
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
from engine.host.core_sharing import CoreClaim, CoreShare, own_share
from engine.host.cpu_affinity import in_machine_order, settle_on

log = logging.getLogger(__name__)

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
