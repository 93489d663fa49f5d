"""NICs and GPUs with their locations, from sysfs.

Files that cannot be read are reported and never fatal.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import TypeVar

from kvtransfer.hardware.topology import VARIABLE, Gpu, Host, Nic, Place, net_devices

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
