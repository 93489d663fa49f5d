"""Which lanes satisfy a demand."""

import os

import pytest

from kvtransfer.errors import TransferError, TransportRefused
from kvtransfer.ucx.lanes import StrictLanes


@pytest.mark.parametrize(
    ("wanted", "lanes"),
    [
        (("tcp",), ("tcp/eth0",)),
        (("rc_mlx5", "cuda_ipc"), ("rc_mlx5/mlx5_0:1", "cuda_ipc/cuda")),
        (("rdma",), ("rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1", "cuda_copy/cuda")),
        (("shm",), ("sysv/memory", "cma/memory")),
        ((), ()),
        ((), ("tcp/lo",)),
    ],
)
def test_lanes_that_were_demanded(wanted: tuple[str, ...], lanes: tuple[str, ...]) -> None:
    StrictLanes(wanted).check(lanes)


@pytest.mark.parametrize(
    ("wanted", "lanes"),
    [
        (("rdma",), ("tcp/eth0",)),
        (("rdma",), ("rc_mlx5/mlx5_0:1", "tcp/eth0")),
        (("rc_verbs",), ("rc_mlx5/mlx5_0:1",)),
        (("cma",), ("sysv/memory", "cma/memory")),
        (("tcp",), ()),
    ],
)
def test_lanes_that_were_not(wanted: tuple[str, ...], lanes: tuple[str, ...]) -> None:
    with pytest.raises(TransportRefused) as caught:
        StrictLanes(wanted).check(lanes)
    assert (caught.value.wanted, caught.value.found) == (wanted, lanes)
    assert isinstance(caught.value, TransferError)


def test_lanes_are_allowed_one_by_one() -> None:
    assert StrictLanes().allows("cma/memory")
    assert StrictLanes(("shm",)).allows("cma/memory")
    assert StrictLanes(("tcp",)).allows("cuda_copy/cuda")
    assert not StrictLanes(("rdma",)).allows("cma/memory")


def test_the_refusal_names_both() -> None:
    assert str(TransportRefused(("rdma",), ("tcp/lo",))) == "strict_lanes demands rdma; found tcp/lo"
    assert str(TransportRefused(("rdma", "shm"), ())) == "strict_lanes demands rdma, shm; found none"


def test_ucx_hears_of_a_demand_unless_the_user_has_told_it_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    StrictLanes().narrow_ucx()
    assert "UCX_TLS" not in os.environ
    monkeypatch.setenv("UCX_TLS", "tcp")
    StrictLanes(("rdma",)).narrow_ucx()
    assert os.environ["UCX_TLS"] == "tcp"
    monkeypatch.delenv("UCX_TLS")
    StrictLanes(("rdma",)).narrow_ucx()
    assert "rc_mlx5" in os.environ["UCX_TLS"].split(",")
    assert "tcp" not in os.environ["UCX_TLS"].split(",")
    monkeypatch.delenv("UCX_TLS")
    StrictLanes(("shm",)).narrow_ucx()
    assert os.environ["UCX_TLS"] == "cma,cuda_copy,gdr_copy,knem,posix,rocm_copy,self,sysv,tcp,xpmem"
    monkeypatch.delenv("UCX_TLS")
