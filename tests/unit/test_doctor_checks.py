"""How the doctor judges machines of every kind."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import WorkerConfig
from kvtransfer.hardware.topology import Gpu, Host, Nic, Place
from tandem.doctor.checks import check_all
from tandem.doctor.hosts import PairResult, judge_pairs
from tandem.doctor.machine import Finding, KernelSpeed, Level, Machine, exit_code, read_machine

SWITCH = ("pci0000:16", "0000:16:01.0")
NIC = Nic("mlx5_0:1", True, True, Place((*SWITCH, "0000:18:00.0"), 0), "400 Gb/sec")
GPU = Gpu("0000:1b:00.0", Place((*SWITCH, "0000:1b:00.0"), 0))
VERSIONS = {"nixl": "1.5.1", "ucxx": "0.52.0", "torch": "2.13.0", "grpc": "1.85.1"}
LAPTOP = Machine(
    versions=VERSIONS,
    memlock_bytes=8 << 20,
    shared_memory_bytes=16 << 30,
    ptrace_scope=None,
    open_files=20_000,
    compiler="/usr/bin/c++",
    torch_gpus=(),
    host=Host(),
)
SERVER = replace(LAPTOP, memlock_bytes=None, torch_gpus=("H200",), host=Host((NIC,), (GPU,)))
CONFIG = WorkerConfig(model=Path())


def of(machine: Machine, check: str, config: WorkerConfig = CONFIG) -> list[tuple[Level, str]]:
    findings = check_all(machine, config, 2, {})
    return [(finding.level, finding.found) for finding in findings if finding.check == check]


def settings(**values: object) -> WorkerConfig:
    return WorkerConfig.parse({"model": Path()} | values)


@pytest.mark.parametrize(("machine", "engine"), [(LAPTOP, "torch"), (SERVER, "vllm")])
def test_machines_that_are_all_right(machine: Machine, engine: str) -> None:
    findings = check_all(machine, settings(engine=engine), 2, {})
    assert [finding for finding in findings if finding.level != "ok"] == []
    assert exit_code(findings) == 0


def test_this_machine_can_be_judged() -> None:
    assert check_all(read_machine(settings()), CONFIG, 2, {})


@pytest.mark.parametrize(("transport", "missing"), [("nixl", "nixl"), ("ucxx", "ucxx"), ("nixl", "torch")])
def test_a_package_that_is_needed(transport: str, missing: str) -> None:
    machine = replace(LAPTOP, versions=VERSIONS | {missing: None})
    assert ("broken", f"{missing} is not installed") in of(machine, "packages", settings(transport=transport))


def test_packages_that_are_not_needed_may_be_missing() -> None:
    machine = replace(LAPTOP, versions=VERSIONS | {"ucxx": None, "torch": None})
    assert [level for level, _ in of(machine, "packages", settings(engine="sim"))] == ["ok"]


def test_the_environment_of_vllm() -> None:
    vllm = settings(engine="vllm")
    assert of(replace(LAPTOP, environment={"vllm": None}), "vllm") == [], "the torch engine needs none"
    good = {"vllm": "0.32.1", "nixl": "1.5.1", "tandem-serving": "0.1.0"}
    assert of(replace(LAPTOP, environment=good), "vllm", vllm) == [
        ("ok", "vllm 0.32.1, nixl 1.5.1, tandem-serving 0.1.0")
    ]
    old = of(replace(LAPTOP, environment=good, environment_fault="it lacks names"), "vllm", vllm)
    assert old[1] == ("broken", "it lacks names")
    for fault, finding in {"": ("ok", "vllm can load it"), "it lacks names": ("warning", "it lacks names")}.items():
        machine = replace(LAPTOP, environment=good, extension_faults={"connector": fault})
        assert of(machine, "connector", vllm) == [finding]
    bare = of(replace(LAPTOP, environment=good | {"nixl": None}), "vllm", vllm)
    assert bare[1] == ("broken", "nixl is not installed in vLLM's environment")
    assert of(replace(LAPTOP, environment="no /x/python"), "vllm", vllm) == [("broken", "no /x/python")]


def test_gpus_that_torch_does_not_see() -> None:
    blind = replace(SERVER, torch_gpus=())
    assert of(blind, "gpus", settings(engine="vllm")) == [("warning", "torch sees none, the PCI bus has 1")]
    assert of(blind, "gpus") == [("warning", "the PCI bus has 1, the torch engine uses none")]
    assert of(LAPTOP, "gpus") == [("ok", "torch sees none")]


def test_rdma_that_is_down_or_demanded() -> None:
    down = replace(SERVER, host=Host((replace(NIC, active=False),), (GPU,)))
    assert of(down, "rdma") == [("warning", "down: mlx5_0:1")]
    half = replace(SERVER, host=Host((NIC, replace(NIC, name="mlx5_1:1", active=False)), (GPU,)))
    assert of(half, "rdma") == [("ok", "up: mlx5_0:1 400 Gb/sec"), ("warning", "down: mlx5_1:1")]
    for lanes in (["rdma"], ["tcp", "rc_mlx5"]):
        assert of(LAPTOP, "rdma", settings(strict_lanes=lanes))[0][0] == "broken"
        assert of(SERVER, "rdma", settings(strict_lanes=lanes))[0][0] == "ok"
    assert of(LAPTOP, "rdma", settings(strict_lanes=["tcp"]))[0][0] == "ok"


def test_which_nic_serves_which_gpu_is_said() -> None:
    assert of(SERVER, "nics") == [("ok", "GPU 0000:1b:00.0: mlx5_0:1, on the same PCIe switch")]
    unread = replace(SERVER, host=replace(SERVER.host, unread=("/sys/x: Permission denied",)))
    assert of(unread, "nics")[-1] == ("warning", "could not read /sys/x: Permission denied")


@pytest.mark.parametrize(("limit_mib", "level"), [(64, "broken"), (255, "broken"), (256, "ok")])
def test_memory_that_may_be_pinned_where_there_is_rdma(limit_mib: int, level: Level) -> None:
    assert [found for found, _ in of(replace(SERVER, memlock_bytes=limit_mib << 20), "memlock")] == [level]
    assert [found for found, _ in of(replace(LAPTOP, memlock_bytes=limit_mib << 20), "memlock")] == ["ok"]


@pytest.mark.parametrize(("free", "level"), [(None, "warning"), (127 << 20, "warning"), (128 << 20, "ok")])
def test_shared_memory(free: int | None, level: Level) -> None:
    assert [found for found, _ in of(replace(LAPTOP, shared_memory_bytes=free), "shared memory")] == [level]


@pytest.mark.parametrize(
    ("scope", "transport", "level"),
    [(None, "nixl", "ok"), (0, "nixl", "ok"), (1, "nixl", "warning"), (3, "nixl", "warning"), (1, "ucxx", "ok")],
)
def test_reading_the_memory_of_other_processes(scope: int | None, transport: str, level: Level) -> None:
    found = of(replace(LAPTOP, ptrace_scope=scope), "ptrace scope", settings(transport=transport))
    assert [judged for judged, _ in found] == [level]


def test_open_files_and_compiler() -> None:
    assert of(replace(LAPTOP, open_files=1024), "open files") == [("warning", "at most 1024")]
    bare = replace(LAPTOP, compiler=None)
    assert of(bare, "compiler") == [("warning", "no C++ compiler")]
    assert of(bare, "compiler", settings(backend="native")) == [("broken", "no C++ compiler")]
    assert of(bare, "compiler", settings(backend="sdpa")) == of(bare, "compiler", settings(engine="sim")) == []
    assert of(replace(SERVER, compiler=None), "compiler", settings(engine="vllm")) == []


def test_the_cpu_kernels_and_their_speed() -> None:
    assert of(LAPTOP, "cpu kernels") == []
    fast = {"kernels": 40.0, "torch bfloat16": 9.0, "torch float32": 20.0}
    speed = KernelSpeed("AVX2", 2, {"1": fast, "256": fast})
    ((level, said),) = of(replace(LAPTOP, kernels=speed), "cpu kernels")
    assert level == "ok"
    assert said.startswith("AVX2; 2 threads; GFLOP/s of a bfloat16 layer, 1 row: kernels 40, torch bfloat16 9")
    slow = replace(speed, gflops={"1": fast, "256": fast | {"kernels": 5.0}})
    assert [judged for judged, _ in of(replace(LAPTOP, kernels=slow), "cpu kernels")] == ["warning"]
    broken = replace(LAPTOP, kernels="c++ failed")
    assert of(broken, "cpu kernels") == [("warning", "c++ failed")]
    assert of(broken, "cpu kernels", settings(backend="native")) == [("broken", "c++ failed")]


def test_this_machine_s_kernels_are_timed() -> None:
    machine = read_machine(settings())
    assert isinstance(machine.kernels, KernelSpeed), machine.kernels
    assert all(figure > 0 for of_rows in machine.kernels.gflops.values() for figure in of_rows.values())
    assert read_machine(settings(engine="sim")).kernels is None


def test_a_finding_that_is_not_all_right_says_what_to_do() -> None:
    with pytest.raises(AssertionError):
        Finding("check", "broken", "it is")
    assert exit_code([Finding("a", "ok", ""), Finding("b", "warning", "", "do")]) == 0
    assert exit_code([Finding("a", "ok", ""), Finding("b", "broken", "", "do")]) == 1


def pair(**values: object) -> PairResult:
    return replace(PairResult("worker-0", "worker-1", 3.0, ("cma/memory",)), **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "level"),
    [
        (pair(), "ok"),
        (pair(lanes=("tcp/lo",)), "warning"),
        (pair(first_wrong_byte=7, wrong_bytes=1), "broken"),
        (pair(error="PeerGone: gone", gigabytes_per_s=None, lanes=()), "broken"),
    ],
)
def test_pairs(result: PairResult, level: Level) -> None:
    (finding,) = judge_pairs([result], LAPTOP, CONFIG)
    assert finding.level == level
    assert level == "ok" or finding.found.startswith("worker-0 reading worker-1: ")


@pytest.mark.parametrize(
    ("machine", "config", "lanes", "level"),
    [
        (LAPTOP, settings(transport="ucxx"), ("tcp/lo",), "ok"),
        (SERVER, settings(transport="ucxx"), ("tcp/lo",), "warning"),
        (SERVER, settings(transport="ucxx"), ("rc_mlx5/mlx5_0:1",), "ok"),
        (SERVER, CONFIG, ("tcp/lo",), "warning"),
        (SERVER, CONFIG, ("cuda_ipc/cuda",), "ok"),
        (replace(LAPTOP, ptrace_scope=1), CONFIG, ("tcp/lo",), "warning"),
        (replace(LAPTOP, compiler=None), CONFIG, ("tcp/lo",), "warning"),
        (replace(LAPTOP, ptrace_scope=1, compiler=None), CONFIG, ("tcp/lo",), "ok"),
    ],
)
def test_tcp_is_a_fall_back_where_there_is_better(
    machine: Machine, config: WorkerConfig, lanes: tuple[str, ...], level: Level
) -> None:
    assert [finding.level for finding in judge_pairs([pair(lanes=lanes)], machine, config)] == [level]
