"""Where an engine process computes. In children: what they change cannot be taken back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import WorkerConfig
from engine.errors import EngineStartError
from engine.host import cores as cores
from engine.host.cores import AUTOGROUP, available_cores, cpu_quota, in_machine_order, stay_on

REPORT = """
import json, os, sys
from engine.host.cores import AUTOGROUP, stay_on, step_back
step_back(int(sys.argv[1]))
stay_on([int(sys.argv[2])])
group = AUTOGROUP.read_text() if AUTOGROUP.exists() else ""
print(json.dumps([os.nice(0), sorted(os.sched_getaffinity(0)), os.getsid(0) == os.getpid(), group]))
"""


def child(niceness: int, core: int) -> tuple[int, list[int], bool, str]:
    command = [sys.executable, "-c", REPORT, str(niceness), str(core)]
    nice, own, leads, group = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return nice, own, leads, group


def test_an_engine_stays_on_its_cores_and_steps_back_as_a_session_of_its_own() -> None:
    core = max(os.sched_getaffinity(0))
    nice, own, leads, group = child(4, core)
    assert (nice, own, leads) == (os.nice(0) + 4, [core], True)
    if AUTOGROUP.exists():
        assert group.split()[-1] == "4"


def test_without_niceness_nothing_changes() -> None:
    nice, _, leads, _ = child(0, max(os.sched_getaffinity(0)))
    assert (nice, leads) == (os.nice(0), False)


def test_a_core_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineStartError, match=r"cores: .*4095"):
        stay_on([4095])


def control_group(folder: Path, line: str, **files: str) -> float | None:
    """The quota of a process that this line of its control groups is of, in a tree of these files."""
    own = folder / "own"
    own.write_text(f"12:pids:/elsewhere\n{line}\n")
    for name, content in files.items():
        file = folder / name.replace("__", "/").replace("_max", ".max").replace("cpu_cfs", "cpu.cfs")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return cpu_quota(folder, own)


@pytest.mark.parametrize(
    ("line", "files", "quota"),
    [
        ("0::/", {"cpu_max": "150000 100000"}, 1.5),
        ("0::/", {"cpu_max": "max 100000"}, None),
        ("0::/", {}, None),
        ("0::/not/visible", {"cpu_max": "200000 100000"}, 2),
        ("0::/pod/engine", {"pod__engine__cpu_max": "max 100000", "pod__cpu_max": "50000 100000"}, 0.5),
        ("0::/pod/engine", {"pod__engine__cpu_max": "400000 100000", "pod__cpu_max": "800000 100000"}, 4),
        ("4:cpu:/a", {"cpu__a__cpu_cfs_quota_us": "300000", "cpu__a__cpu_cfs_period_us": "100000"}, 3),
        ("4:cpu:/a", {"cpu__a__cpu_cfs_quota_us": "-1", "cpu__a__cpu_cfs_period_us": "100000"}, None),
        ("0::/", {"cpu_max": "strange"}, None),
    ],
)
def test_a_containers_limit_is_known(tmp_path: Path, line: str, files: dict[str, str], quota: float | None) -> None:
    assert control_group(tmp_path, line, **files) == quota


@pytest.mark.parametrize(("quota", "count"), [(None, 8), (0.5, 1), (2.5, 3), (100, 8)])
def test_no_more_threads_than_the_limit_has_time_for(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, count: int
) -> None:
    seen = set(range(4, 12))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: seen)
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert WorkerConfig(model=Path("m")).num_threads == count
    assert WorkerConfig(model=Path("m"), cores=(4, 5)).num_threads == 2
    assert WorkerConfig(model=Path("m"), tensor_parallel=2).of_rank(0).threads == max(1, count // 2)
    chosen = available_cores()
    assert (len(set(chosen)), set(chosen) <= seen, chosen) == (count, True, in_machine_order(chosen))


def test_neighbours_in_the_machines_order_are_near_each_other(tmp_path: Path) -> None:
    for core in range(8):  # two sockets of two cores of two threads, numbered as Linux mostly does
        topology = tmp_path / f"cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{core // 2 % 2}\n")
        (topology / "core_id").write_text(f"{core % 2}\n")
    assert in_machine_order(range(8), tmp_path) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert in_machine_order([7, 2, 3], tmp_path) == [2, 3, 7]


def test_where_the_machine_does_not_say_cores_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    assert in_machine_order({8, 1, 3}, tmp_path) == [1, 3, 8]
