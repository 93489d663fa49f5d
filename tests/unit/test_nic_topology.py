"""Which NIC serves which GPU, of hosts as sysfs describes them."""

from pathlib import Path

import pytest

from kvtransfer.hardware.topology import (
    Choice,
    Distance,
    Gpu,
    Host,
    Nic,
    Place,
    choices,
    distance,
    net_devices,
    pick_gpu,
    read_host,
)


class FakeSys:
    """A sysfs, as far as it is read."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def device(self, path: str, numa: int) -> Path:
        folder = self.root / "devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text(f"{numa}\n")
        return folder

    def link(self, path: str, target: Path) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def gpu(self, path: str, numa: int) -> None:
        device = self.device(path, numa)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
        self.link(f"bus/pci/devices/{device.name}", device)

    def rdma(self, name: str, path: str, numa: int, state: str = "4: ACTIVE") -> None:
        device = self.device(path, numa)
        self.write(f"class/infiniband/{name}/ports/1/state", state)
        self.write(f"class/infiniband/{name}/ports/1/rate", "400 Gb/sec (4X NDR)")
        self.link(f"class/infiniband/{name}/device", device)

    def net(self, name: str, path: str, numa: int, state: str = "up") -> None:
        self.write(f"class/net/{name}/operstate", state)
        self.link(f"class/net/{name}/device", self.device(path, numa))


@pytest.fixture
def eight(tmp_path: Path) -> FakeSys:
    """Eight GPUs and eight NICs, in pairs on a switch each, four of them at a CPU; and a NIC for management."""
    sys = FakeSys(tmp_path)
    for number in range(8):
        root, switch = f"pci0000:{number + 1}0", f"0000:{number + 1}0:01.0/0000:{number + 1}1:00.0"
        sys.gpu(f"{root}/{switch}/0000:{number + 1}2:00.0/0000:{number + 1}3:00.0", number // 4)
        sys.rdma(f"mlx5_{number}", f"{root}/{switch}/0000:{number + 1}2:01.0/0000:{number + 1}4:00.0", number // 4)
    sys.net("eth0", "pci0000:00/0000:00:03.0/virtio0", 0)
    sys.write("class/net/lo/operstate", "unknown")
    sys.write("class/net/docker0/operstate", "up")
    return sys


def test_each_of_eight_gpus_gets_the_nic_of_its_switch(eight: FakeSys) -> None:
    host = read_host(eight.root)
    assert host.unread == ()
    assert [(choice.gpu.address, [nic.name for nic in choice.nics]) for choice in choices(host)] == [
        (f"0000:{number + 1}3:00.0", [f"mlx5_{number}:1"]) for number in range(8)
    ]
    assert {choice.distance for choice in choices(host)} == {Distance.SWITCH}
    assert str(choices(host)[2]) == "GPU 0000:33:00.0: mlx5_2:1, on the same PCIe switch"
    assert [nic.name for nic in host.nics if not nic.rdma] == ["eth0"]
    assert host.active_rdma[0].rate == "400 Gb/sec (4X NDR)"


def test_a_nic_that_is_down_is_replaced_by_those_of_its_numa_node(eight: FakeSys) -> None:
    eight.write("class/infiniband/mlx5_5/ports/1/state", "1: DOWN")
    choice = choices(read_host(eight.root))[5]
    assert [nic.name for nic in choice.nics] == ["mlx5_4:1", "mlx5_6:1", "mlx5_7:1"]
    assert choice.distance == Distance.NUMA


def test_ten_devices_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    sys = FakeSys(tmp_path)
    for number in range(11):
        sys.rdma(f"mlx5_{number}", f"pci0000:00/0000:{number:02x}:00.0", 0)
    assert [nic.name for nic in read_host(tmp_path).nics] == [f"mlx5_{number}:1" for number in range(11)]


def test_ucx_is_told_only_where_that_narrows_and_the_user_has_not_told_it(eight: FakeSys) -> None:
    host = read_host(eight.root)
    assert net_devices(host, "0000:83:00.0", {}) == ("mlx5_7:1", "GPU 0000:83:00.0: mlx5_7:1, on the same PCIe switch")
    assert net_devices(host, "0000:83:00.0", {"UCX_NET_DEVICES": "eth0"}) == (
        None,
        "UCX_NET_DEVICES=eth0, as set by the user",
    )
    assert net_devices(host, "0000:99:00.0", {})[0] is None
    one = Host(tuple(host.active_rdma[:1]), host.gpus)
    assert net_devices(one, "0000:83:00.0", {})[0] is None
    assert net_devices(Host((), host.gpus), "0000:83:00.0", {}) == (
        None,
        "UCX chooses the NICs: GPU 0000:83:00.0: no RDMA device is up",
    )


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Place(("r", "a", "g")), Place(("r", "a", "n")), Distance.SWITCH),
        (Place(("r", "a", "g"), 0), Place(("r", "b", "n"), 0), Distance.ROOT),
        (Place(("r", "a", "g"), 0), Place(("s", "b", "n"), 0), Distance.NUMA),
        (Place(("r", "a", "g"), 0), Place(("s", "b", "n"), 1), Distance.SYSTEM),
        (Place((), None), Place((), None), Distance.SYSTEM),
    ],
)
def test_distances(one: Place, other: Place, expected: Distance) -> None:
    assert distance(one, other) == distance(other, one) == expected


def test_of_two_nics_below_one_root_port_the_nearer_serves() -> None:
    gpu = Gpu("g", Place(("r", "port", "up", "left", "g")))
    near = Nic("near", True, True, Place(("r", "port", "up", "left", "n")))
    far = Nic("far", True, True, Place(("r", "port", "up", "right", "n")))
    assert choices(Host((far, near), (gpu,))) == [Choice(gpu, (near,), Distance.SWITCH)]


def test_what_cannot_be_read_is_said_and_the_rest_is_read(eight: FakeSys) -> None:
    (eight.root / "class/infiniband/mlx5_3/ports/1/state").unlink()
    host = read_host(eight.root)
    assert host.unread == (f"{eight.root}/class/infiniband/mlx5_3/ports/1/state: No such file or directory",)
    assert len(host.active_rdma) == 7
    assert read_host(eight.root / "nowhere") == Host()


def test_this_machine() -> None:
    """Whatever it has, it can be read."""
    host = read_host()
    names = {path.name for path in Path("/sys/class/net").iterdir()} if Path("/sys/class/net").is_dir() else set()
    assert {nic.name for nic in host.nics if not nic.rdma} <= names
    assert len(choices(host)) == len(host.gpus)


SAID = """0, GPU-aaaa, 00000000:1B:00.0
1, GPU-bbbb, 00000000:43:00.0
"""


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "0000:1b:00.0"),
        ("1", "0000:43:00.0"),
        ("1,0", "0000:43:00.0"),
        ("GPU-bb", "0000:43:00.0"),
        ("7", None),
        ("", None),
    ],
)
def test_the_first_gpu_that_a_process_sees(visible: str | None, expected: str | None) -> None:
    assert pick_gpu(SAID, visible) == expected


def test_nvidia_smi_says_something_else() -> None:
    assert pick_gpu("NVIDIA-SMI has failed\n", None) is None
