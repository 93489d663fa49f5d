"""Lanes that UCX really uses, read from its own protocol log.

UCX logs its protocol choice for each kind of endpoint when `UCX_PROTO_INFO=y`. The log goes into memory that only this
process sees. An endpoint gets a table of its own only when its choice is new to the process, so lanes are known per
process, not per peer.

Permitted UCX transports, and the refusal when bytes would travel over others.

Two guards: UCX is given only the permitted transports, so it fails instead of falling back; and the lanes that UCX
reports are compared after the first read of each peer, before the bytes of that read count, since a UCX_TLS set by the
user stays unchanged.
"""

import ctypes
import os
import re
from collections.abc import Iterable
from functools import cache

from kvtransfer.errors import TransportRefused

# A table is a title, "| borrower intra-node cfg#1 |" and "| remote memory read by ucp_get* ... |" in two lines or one,
# then rows such as "| 0..inf | zero-copy | cma/memory |". Lanes look like "rc_mlx5/mlx5_0:1".
_ROW = re.compile(r"\|\s*\d\S*\s*\|[^|]*\|\s*(?P<config>[^|]+?)\s*\|\s*$")
_LIBC = ctypes.CDLL(None)
_LANE = re.compile(r"[a-z0-9_]+/[\w:.-]+")


class LaneLog:
    """Log of UCX's protocol choices.

    Create it before UCX is loaded, since it works through UCX's environment.
    """

    def __init__(self, operation: str) -> None:
        """Open the log for `operation`, UCX's name of what moves the bytes, such as "ucp_get"."""
        self._operation = operation
        self._fd = os.memfd_create("tandem-ucx-log")
        os.environ["UCX_PROTO_INFO"] = "y"
        os.environ["UCX_LOG_FILE"] = f"/proc/self/fd/{self._fd}"
        self._size = -1
        self._lanes: tuple[str, ...] = ()

    def lanes(self) -> tuple[str, ...]:
        """Lanes of the operation from or to other processes so far, in order of appearance."""
        _LIBC.fflush(None)  # UCX writes through a buffered stream of its own
        size = os.fstat(self._fd).st_size
        if size != self._size:
            self._size, self._lanes = size, self._read()
        return self._lanes

    def _read(self) -> tuple[str, ...]:
        with open(f"/proc/self/fd/{self._fd}", encoding="utf-8", errors="replace") as log:
            return read_lanes(log, self._operation)


@cache
def process_lane_log(operation: str) -> LaneLog:
    """Return this process's log for the transport that uses `operation`.

    Each transport has a UCX library of its own, which opens its log once; a second log would stay empty.
    """
    return LaneLog(operation)


def read_lanes(lines: Iterable[str], operation: str) -> tuple[str, ...]:
    """Return the lanes in the tables of `operation` towards other processes."""
    lanes: dict[str, None] = {}
    to_others = reading = False
    for line in lines:
        if " cfg#" in line:
            to_others, reading = " self cfg#" not in line, False
        if " by ucp_" in line:
            reading = to_others and operation in line
        elif reading and (row := _ROW.search(line)):
            lanes.update(dict.fromkeys(_LANE.findall(row["config"])))
    return tuple(lanes)


GROUPS = {
    "rdma": ("rc_mlx5", "rc_verbs", "dc_mlx5", "ud_mlx5", "ud_verbs", "gga_mlx5"),
    "shm": ("cma", "knem", "posix", "sysv", "xpmem"),
}
"""Group names for several UCX transports. rdma: InfiniBand or RoCE. shm: main memory within one host."""
COPIES = ("cuda_copy", "gdr_copy", "rocm_copy", "self")
"""Transports that copy within a process, between GPU and main memory; they are no lane between two processes."""


class StrictLanes:
    """Set of permitted lanes.

    An empty set permits all.
    """

    def __init__(self, wanted: Iterable[str] = ()) -> None:
        """Parse `wanted`: UCX transports such as "rc_mlx5", "cuda_ipc" or "tcp", or names in GROUPS."""
        self.wanted = tuple(wanted)
        self._allowed = {name for want in self.wanted for name in GROUPS.get(want, (want,))}

    def __bool__(self) -> bool:
        return bool(self.wanted)

    def narrow_ucx(self) -> None:
        """Restrict UCX's environment.

        Call it before UCX is loaded into the process.
        """
        if not self.wanted:
            return
        known = self._allowed | set(COPIES)
        if self._allowed & set(GROUPS["shm"]):
            known.add("tcp")  # for UCX's own messages, which with error handling do not use shared memory
        os.environ.setdefault("UCX_TLS", ",".join(sorted(known)))

    def allows(self, lane: str) -> bool:
        """Return whether a lane, as `Peer.lanes` writes it, is permitted."""
        return not self.wanted or lane.partition("/")[0] in self._allowed | set(COPIES)

    def check(self, lanes: tuple[str, ...]) -> None:
        """Check `lanes` as `Peer.lanes` writes them, such as "rc_mlx5/mlx5_0:1".

        Raises TransportRefused when one is not permitted, or when no lane is known.
        """
        if self.wanted and not (lanes and all(map(self.allows, lanes))):
            raise TransportRefused(self.wanted, lanes)

    def unavailable(self, cause: object) -> TransportRefused:
        """Return the error of a transport that did not start once UCX was restricted."""
        return TransportRefused(self.wanted, (), str(cause))
