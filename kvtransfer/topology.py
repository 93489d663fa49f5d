"""Which NIC serves which GPU: the nearest of those that are up, by PCIe and NUMA. Decided on what `sysfs.py` read.

UCX guesses distances for itself, but uses the NICs of the whole host for what it takes to be equally far; with eight
GPUs and eight NICs every GPU's bytes then cross the host's interconnect. A choice is made only where it narrows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile

VARIABLE = "UCX_NET_DEVICES"


class Distance(IntEnum):
    """How far two devices of a host are from each other."""

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
    """Where a device is. `path`: from its PCIe root to itself, such as ("pci0000:16", "0000:16:01.0", "0000:17:00.0");
    empty where it is not known, or for a device that is not on PCIe."""

    path: tuple[str, ...] = ()
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class Nic:
    """A port of a network device."""

    name: str
    """As UCX calls it: "mlx5_0:1" of an RDMA device, "eth0" of another."""
    rdma: bool
    active: bool
    place: Place = Place()
    rate: str = ""
    """As the system says it, such as "400 Gb/sec (4X NDR)"."""


@dataclass(frozen=True, slots=True)
class Gpu:
    address: str
    """On PCI, such as "0000:1b:00.0"."""
    place: Place = Place()


@dataclass(frozen=True, slots=True)
class Host:
    """What could be read of a host."""

    nics: tuple[Nic, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    unread: tuple[str, ...] = ()
    """What could not, in words."""

    @property
    def active_rdma(self) -> list[Nic]:
        return [nic for nic in self.nics if nic.rdma and nic.active]


@dataclass(frozen=True, slots=True)
class Choice:
    """The NICs for a GPU, all equally near. None where there is no RDMA that is up."""

    gpu: Gpu
    nics: tuple[Nic, ...]
    distance: Distance

    def __str__(self) -> str:
        if not self.nics:
            return f"GPU {self.gpu.address}: no RDMA device is up"
        return f"GPU {self.gpu.address}: {', '.join(nic.name for nic in self.nics)}, {WORDS[self.distance]}"


def common_depth(one: Place, other: Place) -> int:
    """How many bridges from the root down two devices share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.path, other.path, strict=False)))


def distance(one: Place, other: Place) -> Distance:
    """Below one port of a root, at one root, at one CPU, or neither."""
    shared = common_depth(one, other)
    if shared >= 2:  # the root itself, and a bridge below it
        return Distance.SWITCH
    if shared == 1:
        return Distance.ROOT
    if one.numa_node is not None and one.numa_node == other.numa_node:
        return Distance.NUMA
    return Distance.SYSTEM


def choose(gpu: Gpu, nics: Sequence[Nic]) -> Choice:
    """The nearest RDMA devices that are up; of those below one root port, the ones that share most bridges."""
    ranked = [(distance(gpu.place, nic.place), -common_depth(gpu.place, nic.place), nic) for nic in nics]
    usable = [rank for rank in ranked if rank[2].rdma and rank[2].active]
    if not usable:
        return Choice(gpu, (), Distance.SYSTEM)
    best = min(rank[:2] for rank in usable)
    return Choice(gpu, tuple(nic for *rank, nic in usable if tuple(rank) == best), best[0])


def choices(host: Host) -> list[Choice]:
    """For each GPU."""
    return [choose(gpu, host.nics) for gpu in host.gpus]


def net_devices(host: Host, gpu_address: str, environment: Mapping[str, str]) -> tuple[str | None, str]:
    """What UCX_NET_DEVICES should be for a process on that GPU, or None to leave it; and why, in words."""
    if VARIABLE in environment:
        return None, f"{VARIABLE}={environment[VARIABLE]}, as set by the user"
    gpu = next((gpu for gpu in host.gpus if gpu.address == gpu_address.lower()), None)
    if gpu is None:
        return None, f"UCX chooses the NICs: GPU {gpu_address} is not among those of this host"
    choice = choose(gpu, host.nics)
    if not choice.nics or len(choice.nics) == len(host.active_rdma):
        return None, f"UCX chooses the NICs: {choice}" + (", as are all" if choice.nics else "")
    return ",".join(nic.name for nic in choice.nics), str(choice)
