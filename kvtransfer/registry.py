"""Transports by name: `nixl` is built in, others are found by entry points of the group `tandem.transports`.

Parts of other packages, found by their entry points.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from kvtransfer.errors import TransportUnavailable
from kvtransfer.transport import Transport
from kvtransfer.ucx.lanes import StrictLanes


def plugin_names(group: str) -> list[str]:
    """Return the names of a group's entry points, sorted."""
    return sorted({entry.name for entry in entry_points(group=group)})


def load_plugin(group: str, name: str) -> Any:
    """Return the object that a group's entry point names; None where no installed package has such an entry point.

    Raises whatever importing it raises.
    """
    return next((entry.load() for entry in entry_points(group=group, name=name)), None)


GROUP = "tandem.transports"
NIXL = "nixl"
NO_HOOKS = "UCX_MEM_MMAP_HOOK_MODE", "none"
"""UCX setting without memory hooks.

By default UCX rewrites the process's mmap, munmap and others while it loads, 0.4 s of spinning, to learn of
registered memory that is unmapped. `nixl` registers its memory once and keeps it. With GPUs, and for `ucxx`, whose
memory UCX registers on demand, the hooks stay as UCX sets them."""
READ_OVER_CUDA_IPC = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y"
"""UCX setting that reads the memory of another process's GPU over CUDA IPC.

Left alone, UCX does so only where it sees NVLink. Between two workers on one GPU, or GPUs on PCIe, KV would then travel
over TCP, hundreds of times slower."""


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Facts about a process that opens a transport."""

    agent_name: str
    """Name of the process, unique among all that will ever meet."""
    host: str = "127.0.0.1"
    """Host at which peers reach the process."""
    strict: StrictLanes = field(default_factory=StrictLanes)
    """Lanes that are permitted; falsy: all. A transport that cannot promise them raises TransportUnavailable."""
    on_gpu: bool = False
    """Whether pools may be in GPU memory; `register` tells."""


OpenTransport = Callable[[TransportOptions], Transport]
"""Function that an entry point names. Raises TransportUnavailable where the transport does not start."""


def check_transport(name: str) -> None:
    """Check that a transport is installed.

    Raises TransportUnavailable.
    """
    if name not in (names := [NIXL, *plugin_names(GROUP)]):
        raise TransportUnavailable(f"unknown transport {name!r}; installed are {', '.join(names)}")


def open_transport(
    name: str, agent_name: str, host: str = "127.0.0.1", strict_lanes: Sequence[str] = (), on_gpu: bool = False
) -> Transport:
    """Open the transport `name`.

    `agent_name` must be unique among all processes that will ever meet.

    Peers reach this process at `host`. `strict_lanes` are the permitted lanes, see `lanes.py`; a process has one
    such demand at most, since UCX learns it through the environment. `on_gpu`: pools may be in GPU memory.

    Raises TransportUnavailable when the transport does not start here, or when no package has it; TransportRefused when
    it does not start over the demanded lanes.
    """
    if on_gpu:
        os.environ.setdefault(*READ_OVER_CUDA_IPC)
    options = TransportOptions(agent_name, host, StrictLanes(strict_lanes), on_gpu)
    if name == NIXL:
        if not on_gpu:
            os.environ.setdefault(*NO_HOOKS)
        from kvtransfer.nixl import NixlTransport

        return NixlTransport(agent_name, options.strict)
    check_transport(name)
    open_plugin: OpenTransport = load_plugin(GROUP, name)
    return open_plugin(options)
