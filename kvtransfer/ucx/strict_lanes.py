"""Permitted UCX transports, and the refusal when bytes would travel over others.

Two guards: UCX is given only the permitted transports, so it fails instead of falling back; and the lanes that UCX
reports are compared after the first read of each peer, before the bytes of that read count, since a UCX_TLS set by the
user stays unchanged.
"""

import os
from collections.abc import Iterable

from kvtransfer.errors import TransportRefused

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
