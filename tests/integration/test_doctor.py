"""`tandem doctor` with real processes: what is right, what is wrong and named, and what never answers."""

import asyncio
import io
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from cluster.errors import InvalidRequest, StartError
from cluster.network.error_status import from_rpc_error
from cluster.network.rpc import Server, channel
from engine.config import WorkerConfig
from support.certificates import Authority
from support.long_runs import mostly_long
from tandem.doctor.command import run_doctor
from tandem.doctor.hosts import DoctorService, PairResult, measure_pairs, plan_peers, start_peers

HERE = Path(__file__).parent
SIM = {"engine": "sim"}
NUM_BYTES = 9 << 20  # more than one read
START_S = 60.0


def broken(mode: str) -> tuple[str, ...]:
    """The command of a peer with something wrong."""
    return sys.executable, str(HERE / "doctor_peer.py"), mode


def measure(
    mode: str, transport: str = "nixl", workers: int = 2, timeout_s: float = 30.0
) -> dict[tuple[str, str], PairResult]:
    config = WorkerConfig(model=Path(), transport=transport)  # type: ignore[arg-type]
    specs = plan_peers(config, workers, gpu=False, num_bytes=NUM_BYTES)

    async def measured() -> list[PairResult]:
        async with AsyncExitStack() as stack:
            return await measure_pairs(await start_peers(stack, specs, broken(mode)), timeout_s)

    results = asyncio.run(measured())
    return {(result.reader, result.lender): result for result in results}


@pytest.fixture(autouse=True)
def own_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children import what is tested."""
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem.cli", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=HERE.parents[1])


@pytest.mark.parametrize("transport", mostly_long(["nixl", "ucxx"], "nixl"))
def test_a_host_that_is_all_right(transport: str) -> None:
    done = doctor("--json", "--workers", "3", "--set", "engine=sim", "--set", f"transport={transport}")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert set(said) == {"exit_code", "findings", "pairs", "machine", "hosts"}
    assert said["hosts"] == []
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
            "across_hosts",
        }
        assert pair["gigabytes_per_s"] > 0
        assert pair["lanes"]
        assert (pair["first_wrong_byte"], pair["error"]) == (None, "")
    for finding in said["findings"]:
        assert set(finding) == {"check", "level", "found", "advice"}
        assert finding["level"] == "ok" or finding["advice"]
    assert {finding["check"] for finding in said["findings"]} >= {"packages", "rdma", "memlock", "clock", "pairs"}
    assert set(said["machine"]) >= {"versions", "memlock_bytes", "ptrace_scope", "host"}


@contextmanager
def listening(*arguments: str) -> Iterator[str]:
    """Another host, as far as the doctor can tell: its address."""
    command = [
        sys.executable,
        "-u",
        "-m",
        "tandem.cli",
        "doctor",
        "--listen",
        "0",
        "--set",
        "engine=sim",
        *arguments,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1])
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], START_S)[0], "it says nothing"
        said = process.stdout.readline()
        assert said.startswith("listening at 0.0.0.0:"), said
        yield "127.0.0.1:" + said.partition(";")[0].rpartition(":")[2]
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize("transport", mostly_long(["nixl", "ucxx"], "nixl"))
def test_other_hosts_take_part_and_say_what_they_found(transport: str) -> None:
    set_ = ("--set", "engine=sim", "--set", f"transport={transport}")
    with listening(*set_[2:]) as first, listening(*set_[2:]) as second:
        done = doctor("--json", "--workers", "1", "--peer", first, "--peer", second, *set_)
        assert done.returncode == 0, done.stderr
        again = doctor("--workers", "1", "--peer", first, *set_)
    said = json.loads(done.stdout)
    names = ["worker-0", first, second]
    assert [(pair["reader"], pair["lender"]) for pair in said["pairs"]] == [
        (reader, lender) for reader in names for lender in names if reader != lender
    ]
    for pair in said["pairs"]:
        assert (pair["error"], pair["first_wrong_byte"], pair["across_hosts"]) == ("", None, True)
        assert pair["gigabytes_per_s"] > 0
    assert [host["address"] for host in said["hosts"]] == [first, second]
    for host in said["hosts"]:
        assert abs(host["clock_ahead_s"]) <= 0.05 + host["clock_within_s"], "it is the same clock"
        assert {finding["check"] for finding in host["findings"]} >= {"packages", "memlock", "shared memory"}
    clocks = [finding["found"] for finding in said["findings"] if finding["check"] == "clock"]
    assert [clock.rpartition(": ")[0] for clock in clocks] == [first, second]
    assert again.returncode == 0, "a host that was examined can be examined again"
    assert f"{first} (" in again.stdout


def test_a_host_that_is_not_there_is_named_and_the_others_are_examined() -> None:
    with socket.socket() as nobody, listening() as there:
        nobody.bind(("127.0.0.1", 0))
        away = f"127.0.0.1:{nobody.getsockname()[1]}"
        done = doctor("--json", "--workers", "1", "--peer", away, "--peer", there, "--set", "engine=sim")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    (finding,) = (finding for finding in said["findings"] if finding["check"] == "hosts")
    assert finding["level"] == "broken"
    assert finding["found"].startswith(f"{away}: ")
    assert "--listen" in finding["advice"]
    assert [(pair["reader"], pair["error"]) for pair in said["pairs"]] == [("worker-0", ""), (there, "")]


def member_of(authority: Authority) -> list[str]:
    """Options of a process with a certificate of theirs."""
    issued = authority.issue(f"{authority.path.stem}-member")
    settings = {"tls_cert": issued.cert, "tls_key": issued.key, "tls_ca": authority.path}
    return [word for key, path in settings.items() for word in ("--set", f"{key}={path}")]


def test_with_certificates_only_members_examine(tmp_path: Path) -> None:
    ours, theirs = (member_of(Authority(tmp_path, name)) for name in ("ours", "theirs"))
    with listening(*ours) as there:
        right, wrong, none = (
            doctor("--json", "--workers", "1", "--peer", there, "--set", "engine=sim", *settings)
            for settings in (ours, theirs, [])
        )
    assert right.returncode == 0, right.stdout
    for refused in (wrong, none):
        assert refused.returncode == 1
        assert json.loads(refused.stdout)["hosts"] == []


async def test_what_a_stranger_might_say_is_refused_by_name() -> None:
    service = DoctorService([], lambda *_: pytest.fail("nothing is to start"), ())
    server = Server()
    service.add_to(server.grpc)
    cases = {
        b"no json": "request",
        b"[]": "request",
        b'{"endpoint": ""}': "start",
        b'{"start": 1}': "start.seed",
        b'{"start": {"seed": -1, "num_bytes": 1}}': "start.seed",
        b'{"start": {"seed": 1, "num_bytes": 1e9}}': "start.num_bytes",
        b'{"start": {"seed": 1, "num_bytes": 268435457}}': "start.num_bytes",
    }
    async with AsyncExitStack() as stack:
        port = await server.start("127.0.0.1", 0, ["tandem.v1.Doctor"])
        stack.push_async_callback(server.stop, 0.0)
        link = await stack.enter_async_context(channel(f"127.0.0.1:{port}"))
        for said, field in cases.items():
            call = link.stream_stream("/tandem.v1.Doctor/Examine")()
            await call.read()
            await call.write(said)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            error = from_rpc_error(caught.value)
            assert (type(error), error.field) == (InvalidRequest, field)
        first, second = (link.stream_stream("/tandem.v1.Doctor/Examine")() for _ in range(2))
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()


def test_tables_for_people() -> None:
    done = doctor("--set", "engine=sim")
    assert done.returncode == 0, done.stderr
    for expected in ("this host", "what to do", "GB/s, readers down, lenders across", "worker-1"):
        assert expected in done.stdout


@pytest.mark.parametrize("transport", mostly_long(["nixl", "ucxx"], "ucxx"))
def test_a_lender_whose_bytes_are_others_is_named(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    monkeypatch.setattr("tandem.doctor.hosts.PEER_COMMAND", broken("corrupt:2"))
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
    results = measure("hang:2", workers=3, timeout_s=20.0)
    assert results["worker-1", "worker-0"].error == "worker-1 said nothing for 20 s"
    assert results["worker-1", "worker-2"].error == "worker-1 said nothing for 20 s"
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
        (["--workers", "1"], "error: workers: must be 2 to 16, not 1"),
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
    with pytest.raises(StartError, match="must be 2 to 16, not 17"):
        run_doctor(Console(file=io.StringIO()), SIM, None, 17, False)
