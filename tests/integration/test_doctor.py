"""`tandem doctor` with real processes: what is right, what is wrong and named, and what never answers."""

import asyncio
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.errors import StartError
from engine.worker.config import WorkerConfig
from tandem.doctor.command import run_doctor
from tandem.doctor.pairs import PairResult, measure_pairs, plan_peers

HERE = Path(__file__).parent
SIM = {"engine": "sim"}
NUM_BYTES = 9 << 20  # more than one read


def broken(mode: str) -> tuple[str, ...]:
    """The command of a peer with something wrong."""
    return sys.executable, str(HERE / "doctor_peer.py"), mode


def measure(
    mode: str, transport: str = "nixl", workers: int = 2, timeout_s: float = 30.0
) -> dict[tuple[str, str], PairResult]:
    config = WorkerConfig(model=Path(), transport=transport)  # type: ignore[arg-type]
    specs = plan_peers(config, workers, gpu=False, num_bytes=NUM_BYTES)
    results = asyncio.run(measure_pairs(specs, timeout_s, broken(mode)))
    return {(result.reader, result.lender): result for result in results}


@pytest.fixture(autouse=True)
def own_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children import what is tested."""
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem.cli", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=HERE.parents[1])


@pytest.mark.parametrize("transport", ["nixl", "ucxx"])
def test_a_host_that_is_all_right(transport: str) -> None:
    done = doctor("--json", "--workers", "3", "--set", "engine=sim", "--set", f"transport={transport}")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert set(said) == {"exit_code", "findings", "pairs", "machine"}
    assert said["exit_code"] == 0
    names = [f"worker-{number}" for number in range(3)]
    assert [(pair["reader"], pair["lender"]) for pair in said["pairs"]] == [
        (reader, lender) for reader in names for lender in names if reader != lender
    ]
    for pair in said["pairs"]:
        assert set(pair) == {
            "reader",
            "lender",
            "gigabytes_per_s",
            "lanes",
            "first_wrong_byte",
            "wrong_bytes",
            "error",
        }
        assert pair["gigabytes_per_s"] > 0
        assert pair["lanes"]
        assert (pair["first_wrong_byte"], pair["error"]) == (None, "")
    for finding in said["findings"]:
        assert set(finding) == {"check", "level", "found", "advice"}
        assert finding["level"] == "ok" or finding["advice"]
    assert {finding["check"] for finding in said["findings"]} >= {"packages", "rdma", "memlock", "clock", "pairs"}
    assert set(said["machine"]) >= {"versions", "memlock_bytes", "ptrace_scope", "host"}


def test_tables_for_people() -> None:
    done = doctor("--set", "engine=sim")
    assert done.returncode == 0, done.stderr
    for expected in ("this host", "what to do", "GB/s, readers down, lenders across", "worker-1"):
        assert expected in done.stdout


@pytest.mark.parametrize("transport", ["nixl", "ucxx"])
def test_a_lender_whose_bytes_are_others_is_named(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    monkeypatch.setattr("tandem.doctor.pairs.PEER_COMMAND", broken("corrupt:2"))
    shown = io.StringIO()
    assert run_doctor(Console(file=shown, width=200), SIM | {"transport": transport}, None, 2, False) == 1
    assert "worker-0 reading worker-1: 1 bytes arrived wrong, the first at 12345" in shown.getvalue()
    assert "worker-1 reading worker-0" not in shown.getvalue()
    assert "WRONG BYTES" in shown.getvalue()


def test_what_fell_back_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    said: dict[str, Any] = json.loads(doctor("--json", "--set", "engine=sim").stdout)
    assert [finding["level"] for finding in said["findings"] if finding["check"] == "pairs"] == ["warning"] * 2
    assert all(lane.startswith("tcp/") for pair in said["pairs"] for lane in pair["lanes"])


@pytest.mark.parametrize("transport", ["nixl", "ucxx"])
def test_a_transport_that_is_not_installed(transport: str) -> None:
    results = measure("missing", transport)
    assert all(result.error.startswith("TransportUnavailable: ") for result in results.values())
    assert transport in next(iter(results.values())).error.lower()


def test_lanes_that_are_demanded_and_not_there() -> None:
    done = doctor("--json", "--set", "engine=sim", "--set", "strict_lanes=[rdma]")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert all(pair["error"].startswith("TransportRefused: strict_lanes demands rdma") for pair in said["pairs"])
    assert ("rdma", "broken") in [(finding["check"], finding["level"]) for finding in said["findings"]]


def test_a_process_that_hangs_costs_its_pairs_a_bounded_time() -> None:
    began = time.monotonic()
    results = measure("hang:2", workers=3, timeout_s=3.0)
    assert time.monotonic() - began < 30
    assert results["worker-1", "worker-0"].error == "worker-1 said nothing for 3 s"
    assert results["worker-1", "worker-2"].error == "worker-1 said nothing for 3 s"
    assert results["worker-0", "worker-2"].error == results["worker-2", "worker-0"].error == ""


def test_a_process_that_dies_fails_its_pairs_and_no_others() -> None:
    results = measure("die:2", workers=3)
    assert results["worker-1", "worker-0"].error == "worker-1 ended with code -9"
    assert results["worker-0", "worker-2"].error == results["worker-2", "worker-0"].error == ""


def test_no_process_is_left_behind() -> None:
    measure("hang:1", timeout_s=0.5)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_text() for child in children if Path(f"/proc/{child}").exists()]
    assert not [command for command in commands if "doctor_peer" in command]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--workers", "1"], "error: workers: a pair takes 2"),
        (["--set", "transport=pigeon"], "error: transport: "),
        (["--set", "wings=2"], "error: wings: unknown key"),
        (["--model", "/nowhere"], "error: model: no directory '/nowhere'"),
        (["--config", "/nowhere.yaml"], "error: config: cannot read /nowhere.yaml"),
    ],
)
def test_what_cannot_be_checked_at_all(arguments: list[str], cause: str) -> None:
    done = doctor(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(cause)


def test_too_many_workers() -> None:
    with pytest.raises(StartError, match="16 are the most"):
        run_doctor(Console(file=io.StringIO()), SIM, None, 17, False)
