"""Transports by name."""

import os
from collections.abc import Sequence

from kvtransfer.strict_lanes import StrictLanes
from kvtransfer.transport import Transport

NAMES = ("nixl", "ucxx")
"""Those that work between processes."""
NO_HOOKS = "UCX_MEM_MMAP_HOOK_MODE", "none"
"""Else UCX rewrites the process's mmap, munmap and so on as it is loaded, which takes 0.4 s of spinning, to hear of
memory that goes while it is registered. What `nixl` reads into is registered once, and stays. With GPUs, and for
`ucxx`, whose memory UCX registers as it comes, hooks are as UCX wants them."""


def open_transport(
    name: str, agent_name: str, host: str = "127.0.0.1", strict_lanes: Sequence[str] = (), on_gpu: bool = False
) -> Transport:
    """`agent_name` must be unique among all processes that will ever meet; peers reach this one by `host`.

    `strict_lanes`: what the bytes must travel over, see `strict_lanes.py`; a process has one demand at most, since
    UCX learns of it through the environment. `on_gpu`: there will be pools in a GPU's memory.

    Raises TransportUnavailable when it does not start here, TransportRefused when it does not over the lanes that are
    demanded, KeyError for an unknown name.
    """
    strict = StrictLanes(strict_lanes)
    if name == "nixl":
        if not on_gpu:
            os.environ.setdefault(*NO_HOOKS)
        from kvtransfer.nixl import NixlTransport

        return NixlTransport(agent_name, strict)
    if name == "ucxx":
        from kvtransfer.ucxx import UcxxTransport

        return UcxxTransport(host, strict)
    raise KeyError(name)
