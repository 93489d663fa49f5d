"""Transports by name."""

import os
from collections.abc import Sequence

from kvtransfer.strict_lanes import StrictLanes
from kvtransfer.transport import Transport

NAMES = ("nixl", "ucxx")
"""Transports that work between processes."""
NO_HOOKS = "UCX_MEM_MMAP_HOOK_MODE", "none"
"""UCX setting without memory hooks.

By default UCX rewrites the process's mmap, munmap and others while it loads, 0.4 s of spinning, to learn of
registered memory that is unmapped. `nixl` registers its memory once and keeps it. With GPUs, and for `ucxx`, whose
memory UCX registers on demand, the hooks stay as UCX sets them."""
READ_OVER_CUDA_IPC = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y"
"""UCX setting that reads the memory of another process's GPU over CUDA IPC.

Left alone, UCX does so only where it sees NVLink. Between two workers on one GPU, or GPUs on PCIe, KV would then travel
over TCP, hundreds of times slower."""


def open_transport(
    name: str, agent_name: str, host: str = "127.0.0.1", strict_lanes: Sequence[str] = (), on_gpu: bool = False
) -> Transport:
    """Open the transport `name`.

    `agent_name` must be unique among all processes that will ever meet.

    Peers reach this process at `host`. `strict_lanes` are the permitted lanes, see `strict_lanes.py`; a process has one
    such demand at most, since UCX learns it through the environment. `on_gpu`: pools will be in GPU memory.

    Raises TransportUnavailable when the transport does not start here, TransportRefused when it does not start over the
    demanded lanes, KeyError for an unknown name.
    """
    strict = StrictLanes(strict_lanes)
    if on_gpu:
        os.environ.setdefault(*READ_OVER_CUDA_IPC)
    if name == "nixl":
        if not on_gpu:
            os.environ.setdefault(*NO_HOOKS)
        from kvtransfer.nixl import NixlTransport

        return NixlTransport(agent_name, strict)
    if name == "ucxx":
        from kvtransfer.ucxx import UcxxTransport

        return UcxxTransport(host, strict)
    raise KeyError(name)
