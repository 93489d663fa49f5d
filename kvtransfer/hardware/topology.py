"""Choice of the NICs that serve a GPU: the nearest active ones, by PCIe and NUMA.

Works on data from `sysfs.py`.

UCX estimates distances itself, but uses all NICs of the host that it takes to be equally near. With eight GPUs and
eight NICs every GPU's bytes then cross the host's interconnect. A choice is made only where it narrows that set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile

VARIABLE = "UCX_NET_DEVICES"


class Distance(IntEnum):
    """Distance between two devices of a host."""

    SWITCH = 0
    ROOT = 1
    NUMA = 2
    SYSTEM = 3


WORDS = {
    Distance.SWITCH: "on the same PCIe switch",
    Distance.ROOT: "on the same PCIe root",
    Distance.NUMA: "on the same NUMA node",
    Distance.SYSTEM: "across the host's interconnect",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a device.

    `path` runs from its PCIe root to itself, such as ("pci0000:16", "0000:16:01.0", "0000:17:00.0"); it is empty where
    unknown, or for a device that is not on PCIe.
    """

    path: tuple[str, ...] = ()
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class Nic:
    """A port of a network device."""

    name: str
    """Name as UCX writes it: "mlx5_0:1" for an RDMA device, "eth0" for another."""
    rdma: bool
    active: bool
    place: Place = Place()
    rate: str = ""
    """Link rate as the system reports it, such as "400 Gb/sec (4X NDR)"."""


@dataclass(frozen=True, slots=True)
class Gpu:
    address: str
    """PCI address, such as "0000:1b:00.0"."""
    place: Place = Place()


@dataclass(frozen=True, slots=True)
class Host:
    """Devices of a host."""

    nics: tuple[Nic, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    unread: tuple[str, ...] = ()
    """Reasons why parts of sysfs could not be read, for display."""

    @property
    def active_rdma(self) -> list[Nic]:
        return [nic for nic in self.nics if nic.rdma and nic.active]


@dataclass(frozen=True, slots=True)
class Choice:
    """NICs for a GPU, all equally near.

    Empty without active RDMA.
    """

    gpu: Gpu
    nics: tuple[Nic, ...]
    distance: Distance

    def __str__(self) -> str:
        if not self.nics:
            return f"GPU {self.gpu.address}: no RDMA device is up"
        return f"GPU {self.gpu.address}: {', '.join(nic.name for nic in self.nics)}, {WORDS[self.distance]}"


def common_depth(one: Place, other: Place) -> int:
    """Return the number of bridges from the root down that two devices share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.path, other.path, strict=False)))


def distance(one: Place, other: Place) -> Distance:
    """Return the distance: below one root port, at one root, at one CPU, or none of these."""
    shared = common_depth(one, other)
    if shared >= 2:  # the root itself, and a bridge below it
        return Distance.SWITCH
    if shared == 1:
        return Distance.ROOT
    if one.numa_node is not None and one.numa_node == other.numa_node:
        return Distance.NUMA
    return Distance.SYSTEM


def choose(gpu: Gpu, nics: Sequence[Nic]) -> Choice:
    """Return the nearest active RDMA devices; below one root port, those that share most bridges."""
    ranked = [(distance(gpu.place, nic.place), -common_depth(gpu.place, nic.place), nic) for nic in nics]
    usable = [rank for rank in ranked if rank[2].rdma and rank[2].active]
    if not usable:
        return Choice(gpu, (), Distance.SYSTEM)
    best = min(rank[:2] for rank in usable)
    return Choice(gpu, tuple(nic for *rank, nic in usable if tuple(rank) == best), best[0])


def choices(host: Host) -> list[Choice]:
    """Return the choice for each GPU."""
    return [choose(gpu, host.nics) for gpu in host.gpus]


def net_devices(host: Host, gpu_address: str, environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Return UCX_NET_DEVICES for a process on that GPU, or None to leave it unset, and the reason in words."""
    if VARIABLE in environment:
        return None, f"{VARIABLE}={environment[VARIABLE]}, as set by the user"
    gpu = next((gpu for gpu in host.gpus if gpu.address == gpu_address.lower()), None)
    if gpu is None:
        return None, f"UCX chooses the NICs: GPU {gpu_address} is not among those of this host"
    choice = choose(gpu, host.nics)
    if not choice.nics or len(choice.nics) == len(host.active_rdma):
        return None, f"UCX chooses the NICs: {choice}" + (", as are all" if choice.nics else "")
    return ",".join(nic.name for nic in choice.nics), str(choice)
