"""Other engines of this host that compute on its CPU cores, and which of those that leaves to this one.

Each engine holds an abstract Unix socket whose name is its claim (`core_sharing.py`). Nobody connects to it: that it is
there is all it says. The kernel lists the names, and takes one away with its process, however that ends. So there is
nobody who deals out cores, no file that outlives anybody, and engines started by hand, by Ray on several hosts or in
containers of one network namespace find each other. Engines in others do not; there containers have their limits.
"""

import os
import re
import socket
import time
from pathlib import Path

from cluster.roles import Role
from engine.worker.config import WorkerConfig
from engine.worker.core_sharing import Claim, CoreShare, own_share
from engine.worker.cores import num_available

LOOK_EVERY_S = 1.0
SOCKETS = Path("/proc/self/net/unix")
NAME = "tandem-cores-1-"
"""And its version: engines of another one are not heeded."""
_LISTED = re.compile(rb" @" + NAME.encode() + rb"(\S+)$", re.MULTILINE)


class Neighbours:
    """As one engine sees them. Used by one thread."""

    def __init__(self, role: Role, told: tuple[int, ...] | None) -> None:
        """`told`: cores that it was told to use. Raises OSError where there are no such sockets, or no list of them."""
        cores = told or tuple(os.sched_getaffinity(0))
        self._own = Claim(time.monotonic_ns(), os.getpid(), role, told is not None, tuple(sorted(cores)))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._share: CoreShare | None = None
        self._look_at = 0.0
        try:
            self._socket.bind(f"\0{NAME}{self._own}".encode())
            _read_claims()
        except OSError:
            self._socket.close()
            raise

    def changed(self) -> CoreShare | None:
        """This engine's share, where it is another than when last asked; the others are looked at once a second. Always
        None for an engine that was told its cores."""
        if self._own.told or time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + LOOK_EVERY_S
        try:
            claims = _read_claims()
        except OSError:  # out of descriptors, say: what was seen last is the best that is known
            return None
        share = own_share(self._own, claims)
        if share == self._share:
            return None
        self._share = share
        return share


def heeds_neighbours(config: WorkerConfig) -> bool:
    """Whether an engine with such settings is to say what it is: told its cores, it is avoided; told nothing, it also
    avoids. A container with time for fewer cores than it sees cannot know which of them others leave to it."""
    if config.cores:
        return True
    return (config.threads, config.tensor_parallel) == (None, 1) and num_available() >= len(os.sched_getaffinity(0))


def _read_claims() -> list[Claim]:
    names = (name.decode(errors="replace") for name in _LISTED.findall(SOCKETS.read_bytes()))
    return [claim for name in names if (claim := Claim.parse(name)) is not None]
