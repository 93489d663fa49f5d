"""Which UCX transports the bytes must travel over, and the refusal when they would travel over others.

Two guards. UCX gets to know only the transports that were demanded, so that it fails where it would fall back; and
what it says of its lanes is compared after the first read of each peer, before the bytes of that read count, since a
UCX_TLS that the user has set himself stays as it is.
"""

import os
from collections.abc import Iterable

from kvtransfer.errors import TransportRefused

GROUPS = {
    "rdma": ("rc_mlx5", "rc_verbs", "dc_mlx5", "ud_mlx5", "ud_verbs", "gga_mlx5"),
    "shm": ("cma", "knem", "posix", "sysv", "xpmem"),
}
"""Names for several transports of UCX. rdma: over InfiniBand or RoCE. shm: within one host, in main memory."""
COPIES = ("cuda_copy", "gdr_copy", "rocm_copy", "self")
"""They move bytes within a process, between a GPU's memory and main memory: no lane between two."""


class StrictLanes:
    """The demand. None is made by an empty one."""

    def __init__(self, wanted: Iterable[str] = ()) -> None:
        """`wanted`: transports of UCX, such as "rc_mlx5", "cuda_ipc" or "tcp", or a name in GROUPS."""
        self.wanted = tuple(wanted)
        self._allowed = {name for want in self.wanted for name in GROUPS.get(want, (want,))}

    def __bool__(self) -> bool:
        return bool(self.wanted)

    def narrow_ucx(self) -> None:
        """Must be called before UCX is loaded into the process."""
        if not self.wanted:
            return
        known = self._allowed | set(COPIES)
        if self._allowed & set(GROUPS["shm"]):
            known.add("tcp")  # for UCX's own messages: with error handling it has none over shared memory
        os.environ.setdefault("UCX_TLS", ",".join(sorted(known)))

    def allows(self, lane: str) -> bool:
        """As `Peer.lanes` says it."""
        return not self.wanted or lane.partition("/")[0] in self._allowed | set(COPIES)

    def check(self, lanes: tuple[str, ...]) -> None:
        """`lanes` as `Peer.lanes` says them, such as "rc_mlx5/mlx5_0:1".

        Raises TransportRefused when one is of a transport that was not demanded, or when nothing is known of them.
        """
        if self.wanted and not (lanes and all(map(self.allows, lanes))):
            raise TransportRefused(self.wanted, lanes)

    def unavailable(self, cause: object) -> TransportRefused:
        """For a transport that did not start once UCX was narrowed."""
        return TransportRefused(self.wanted, (), str(cause))
