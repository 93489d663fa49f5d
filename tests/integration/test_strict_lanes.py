"""Lanes are demanded: they are used, or the transport refuses. It never falls back, and never hangs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
NUM_BYTES = 1 << 20
SEED = 5
TIMEOUT_S = 60.0
HAS_RDMA = any(Path("/sys/class/infiniband").glob("*"))


@pytest.fixture(scope="module", params=["nixl", "ucxx"])
def lender(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A transport's name, and the endpoint of a process that lends by it and demands nothing."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtransfer.contract.lender", "strict-lender", str(SEED), str(NUM_BYTES), request.param],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        text=True,
    )
    yield request.param, json.loads(process.stdout.readline())["endpoint"]
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def read(lender: tuple[str, str], lanes: str, **env: str) -> dict[str, Any]:
    transport, endpoint = lender
    done = subprocess.run(
        [sys.executable, str(HERE / "strict_reader.py"), transport, lanes, endpoint],
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])} | env,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_who_demands_tcp_gets_it(lender: tuple[str, str]) -> None:
    said = read(lender, "tcp")
    assert [lane.partition("/")[0] for lane in said["lanes"]] == ["tcp"]
    expected = np.random.default_rng(SEED).integers(0, 256, NUM_BYTES, np.uint8).sum(dtype=np.int64)
    assert said["sum"] == expected


def test_who_demands_shared_memory_gets_it_where_the_transport_has_it(lender: tuple[str, str]) -> None:
    said = read(lender, "shm")
    if lender[0] == "nixl":
        assert said["lanes"] == ["cma/memory"]
    else:
        assert (said["refused"], said["wanted"]) == ("read", ["shm"])
        assert [lane.partition("/")[0] for lane in said["found"]] == ["tcp"]


@pytest.mark.skipif(HAS_RDMA, reason="this machine has RDMA")
def test_who_demands_rdma_where_there_is_none_is_refused(lender: tuple[str, str]) -> None:
    said = read(lender, "rdma")
    assert (said["wanted"], said["found"]) == (["rdma"], [])
    assert said["message"].startswith("strict_lanes demands rdma; found none (")


def test_what_the_user_made_of_ucx_himself_is_found_out_by_the_first_read(lender: tuple[str, str]) -> None:
    """His UCX_TLS stays; the bytes arrive, and do not count."""
    said = read(lender, "rc_mlx5,cuda_ipc", UCX_TLS="tcp")
    assert said["refused"] == "read"
    assert said["wanted"] == ["rc_mlx5", "cuda_ipc"]
    assert [lane.partition("/")[0] for lane in said["found"]] == ["tcp"]
    assert said["message"] == f"strict_lanes demands rc_mlx5, cuda_ipc; found {', '.join(said['found'])}"
