"""Choice of the NICs that serve a GPU: the nearest active ones, by PCIe and NUMA.

Works on data from `topology.py`.

UCX estimates distances itself, but uses all NICs of the host that it takes to be equally near. With eight GPUs and
eight NICs every GPU's bytes then cross the host's interconnect. A choice is made only where it narrows that set.

NICs and GPUs with their locations, from sysfs.

Files that cannot be read are reported and never fatal.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

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


T = TypeVar("T")
SYS = Path("/sys")
NVIDIA = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
SMI_TIMEOUT_S = 10.0


def read_host(sys: Path = SYS) -> Host:
    """Read the host's devices.

    `sys` is where sysfs is mounted.
    """
    unread: list[str] = []
    rdma = _each(sys / "class/infiniband", lambda device: _rdma_ports(device, unread), unread)
    plain = _each(sys / "class/net", lambda device: _interface(device, unread), unread)
    gpus = _each(sys / "bus/pci/devices", lambda device: _gpu(device, unread), unread)
    nics = [nic for ports in rdma for nic in ports] + [nic for nic in plain if nic is not None]
    return Host(tuple(nics), tuple(gpu for gpu in gpus if gpu is not None), tuple(unread))


def use_nearest_nics(environment: MutableMapping[str, str]) -> str | None:
    """Have UCX use the NICs nearest to this process's GPU.

    Call it before UCX is loaded.

    Returns the choice and its reason in words, also where nothing was chosen; None without a GPU.
    """
    address = first_gpu(environment)
    if address is None:
        return None
    chosen, why = net_devices(read_host(), address, environment)
    if chosen is not None:
        environment[VARIABLE] = chosen
    return why


def first_gpu(environment: Mapping[str, str]) -> str | None:
    """Return the PCI address of CUDA device 0 of this process, from nvidia-smi; None where unknown."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return pick_gpu(output, environment.get("CUDA_VISIBLE_DEVICES"))


def pick_gpu(listing: str, visible: str | None) -> str | None:
    """Pick the address from nvidia-smi's output: a line "index, uuid, address" per GPU.

    `visible` has the format of CUDA_VISIBLE_DEVICES.
    """
    rows = [[field.strip() for field in line.split(",")] for line in listing.splitlines()]
    gpus = [row for row in rows if len(row) == 3]
    wanted = "0" if visible is None else visible.split(",")[0].strip()
    for index, uuid, address in gpus:
        if wanted and (wanted == index or uuid.startswith(wanted)):
            domain, _, rest = address.lower().partition(":")
            return f"{domain[-4:]}:{rest}"  # nvidia-smi writes the domain with eight digits, sysfs with four
    return None


def _each(folder: Path, read: Callable[[Path], T], unread: list[str]) -> list[T]:
    if not folder.is_dir():
        return []
    try:
        return [read(entry) for entry in sorted(folder.iterdir(), key=_by_number)]
    except OSError as error:
        unread.append(f"{folder}: {error.strerror}")
        return []


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sort directory entries by number, so that mlx5_10 follows mlx5_9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _rdma_ports(device: Path, unread: list[str]) -> list[Nic]:
    place = _place(device / "device", unread)
    ports = _each(device / "ports", lambda port: port, unread)
    return [
        Nic(
            f"{device.name}:{port.name}",
            rdma=True,
            active="ACTIVE" in _text(port / "state", unread),
            place=place,
            rate=_text(port / "rate", unread),
        )
        for port in ports
    ]


def _interface(device: Path, unread: list[str]) -> Nic | None:
    """Read a network interface; None for one without hardware, such as a bridge."""
    if not (device / "device").exists():
        return None
    active = _text(device / "operstate", unread) == "up"
    return Nic(device.name, rdma=False, active=active, place=_place(device / "device", unread))


def _gpu(device: Path, unread: list[str]) -> Gpu | None:
    if _text(device / "vendor", unread) != NVIDIA or not _text(device / "class", unread).startswith(DISPLAY_CLASSES):
        return None
    return Gpu(device.name.lower(), _place(device, unread))


def _place(device: Path, unread: list[str]) -> Place:
    """Return the location of a device, given its directory or a link to it."""
    parts = os.path.realpath(device).split("/")
    roots = [number for number, part in enumerate(parts) if _ROOT.fullmatch(part)]
    path = (
        tuple(part for part in parts[roots[0] :] if _ROOT.fullmatch(part) or _PCI_ADDRESS.fullmatch(part))
        if roots
        else ()
    )
    if not (device / "numa_node").exists():
        return Place(path)
    node = _text(device / "numa_node", unread)
    return Place(path, int(node) if node.isdigit() else None)  # -1: the host does not distinguish nodes


def _text(file: Path, unread: list[str]) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        unread.append(f"{file}: {getattr(error, 'strerror', None) or error}")
        return ""
